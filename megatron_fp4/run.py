"""Runs a Megatron training script of the user's, unmodified, with this package's linears.

    torchrun --nproc-per-node N -m megatron_fp4.run SCRIPT --fp4-recipe RECIPE <the script's flags>

The script builds its model and trains it by `megatron.training`'s functions; see
mcore/loop/plugin.py for what follows. Python's search path is that of `python SCRIPT`: a megatron/
folder beside the script, as in a checkout of Megatron-LM, is imported and not an installed wheel.
Without --fp4-recipe the script runs as it would by itself.
"""

import os
import runpy
import sys
from pathlib import Path

from megatron_fp4.errors import ConfigError


def main() -> None:
    """Runs the script that sys.argv names, with the flags that follow it.

    Exits with status 1, after one line to stderr, on a ConfigError and if a GPU is out of memory.
    """
    from megatron_fp4.mcore import release
    from megatron_fp4.mcore.runtime import process

    with process.ending_in_one_line():
        script = _script(sys.argv[1:])
        sys.argv = sys.argv[1:]
        if not sys.flags.safe_path:  # with -P Python puts no script's folder there
            sys.path[0] = str(script.resolve().parent)
        found = release.checked_release()
        if not int(os.environ.get("RANK", "0")):
            print(f"megatron-fp4: {script.name} with {found}", flush=True)
        process.prepare(ours=False)
        # Imported after that: these modules import megatron, which needs a device.
        from megatron_fp4.mcore.loop import plugin
        from megatron_fp4.mcore.model import graphs

        follows = plugin.install(ours=False)
        runpy.run_path(str(script), run_name="__main__")
        follows.check_followed()
        graphs.release()


def _script(words: list[str]) -> Path:
    if not words or words[0].startswith("-"):
        raise ConfigError(
            "no script: torchrun --nproc-per-node N -m megatron_fp4.run SCRIPT --fp4-recipe RECIPE "
            "and the script's flags, of which --help lists all"
        )
    script = Path(words[0])
    if not script.is_file():
        raise ConfigError(f"no script {script}: give the path of a Megatron training script first")
    return script


if __name__ == "__main__":
    main()
