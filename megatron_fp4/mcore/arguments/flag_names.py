"""The names of flags. Does not import Megatron."""


def flag_of(name: str) -> str:
    """The flag that sets an argument: "--num-layers" for "num_layers"."""
    return f"--{name.replace('_', '-')}"
