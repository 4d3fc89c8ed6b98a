"""Which release of Megatron is imported, and whether this package works with it.

Does not import Megatron: the release is read before anything of it runs.
"""

import ast
import importlib.util
from pathlib import Path

from megatron_fp4.errors import ConfigError

# The package index has 0.19.0 and 0.19.2; the source at upstream's tag core_v0.19.0 says 0.19.1.
TRIED = ("0.19.0", "0.19.1", "0.19.2")
_SERIES = "0.19."
# What earlier and later releases lack, or have changed, by the start of their names.
_OTHERS = {
    "0.16.": "its wheel has no megatron.training",
    "0.17.": "its pretrain parses the command line itself, and it has no megatron.training.models",
    "0.18.": "it has no GPTModelConfig, by which scripts of 0.19 build their model",
    "0.20.": "the constructors of its linears have changed",
}


def checked_release() -> str:
    """The release of the Megatron that Python would import, and its folder, as text.

    Raises ConfigError if it is of another series than this package works with.
    """
    folder = installed()
    name = name_of(folder)
    if not name.startswith(_SERIES):
        raise ConfigError(f"Megatron-core {name} in {folder} is not supported: {why_not(name)}")
    return f"Megatron-core {name} in {folder}"


def why_not(name: str) -> str:
    """Why the release `name` is not supported, and what to do, as a part of a sentence."""
    reason = next(
        (why for start, why in _OTHERS.items() if name.startswith(start)), "it is unknown"
    )
    return f"{reason}; use {TRIED[0]} to {TRIED[-1]}"


def installed() -> Path:
    """The folder megatron/ that Python imports. Raises ConfigError if there is none with a core."""
    found = importlib.util.find_spec("megatron")
    places = [] if found is None else found.submodule_search_locations or []
    for folder in map(Path, places):
        if (folder / "core" / "__init__.py").is_file():
            return folder
    raise ConfigError("no Megatron-core is installed: pip install megatron-core, or a checkout")


def name_of(folder: Path) -> str:
    """The name of the release in a folder megatron/, such as "0.19.0".

    It is read from core/package_info.py. Raises ConfigError if that file names no release.
    """
    file = folder / "core" / "package_info.py"
    try:
        statements = ast.parse(file.read_text()).body
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{file} cannot be read: {folder} is no folder of Megatron's") from error
    found: dict[str, object] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = statement.value.value
    try:
        return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}{found.get('PRE_RELEASE', '')}"
    except KeyError as error:
        raise ConfigError(f"{file} names no release: it has no {error.args[0]}") from error
