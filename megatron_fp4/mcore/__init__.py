"""All of the package that knows Megatron."""
