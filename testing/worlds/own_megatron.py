"""Runs the scripts of testing/own_megatron/ by megatron_fp4/run.py, in torchrun worlds."""

from pathlib import Path

from testing.worlds.launch import MOCK_DATA, ROOT, SCRIPTS, TINY, Result, result_of, spawn

OWN = ROOT / "testing" / "own_megatron"
RUN = ROOT / "megatron_fp4" / "run.py"
WITH_MISTAKES = SCRIPTS / "run_with_mistakes.py"
ON_A_CPU = SCRIPTS / "run_on_a_cpu.py"


def run(
    script: str | Path,
    processes: int,
    *flags: str,
    by: Path = RUN,
    mistake: str | None = None,
    fresh: bool = False,
) -> Result:
    """Runs a script with TINY, mock data and `flags`; see `spawn`.

    script: the name of a script of testing/own_megatron/, or a path. by: what runs it. mistake: of
    run_with_mistakes.py, if `by` is that.
    """
    words = [] if mistake is None else [mistake]
    words += [str(OWN / script), *TINY, *MOCK_DATA, *flags]
    return result_of(spawn(processes, by, *words, fresh=fresh))


def changing(folder: Path, source: str) -> Path:
    """Writes a user's training script that replaces functions of Megatron, and returns its path.

    folder: where it is written. source: Python statements, which see the module
    megatron.training.training as `training`. After them the script trains as provider.py does.
    """
    script = folder / "script.py"
    script.write_text(
        "import runpy, sys\nfrom megatron.training import training\n"
        f"{source}\nsys.path.insert(0, {str(OWN)!r})\n"
        "runpy.run_module('provider', run_name='__main__')\n"
    )
    return script
