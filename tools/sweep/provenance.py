"""Where the results of a sweep were made: devices, versions and commits, of the rows' stamps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tools import rows as jsonl
from tools.rows import Row
from tools.sweep import llama
from tools.sweep.stages import STAGES

PACKAGES = ("python", "torch", "triton", "megatron-core", "numpy")


def provenance(rows: Iterable[Row], study: Path | None) -> list[str]:
    """A Markdown list that says where results were made: stages, devices, versions and commits.

    Stages that ran on the same devices with the same versions share an item. rows: of all stages.
    study: the result file of the last stage's runs, since its rows do not record this; None if
    there are none.
    """
    stages: dict[str, dict[str, None]] = {}  # by device and versions, each stage once
    commits: dict[str, dict[str, None]] = {}
    for stage, stamp, numerics in _stamps(rows, study):
        told = _told(stamp, numerics, on_cpu=stage in STAGES)
        stages.setdefault(told, {})[f"`{stage}`"] = None
        commits.setdefault(told, {})[stamp["commit"][:12]] = None
    return [
        f"- {', '.join(each)}: {told}, commit {', '.join(commits[told])}."
        for told, each in stages.items()
    ]


def _stamps(rows: Iterable[Row], study: Path | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The stage, the stamp and the version of the numerics of each row, or of its runs."""
    has_runs = False
    for row in rows:
        if row["stage"] in STAGES:
            yield row["stage"], row["stamp"], row["numerics"]
        has_runs |= row["stage"] == llama.NAME
    for run in jsonl.read(study, llama.KEYS) if study and has_runs else []:
        yield llama.NAME, run["stamp"], run["configuration"]["numerics"]


def _told(stamp: dict[str, Any], numerics: int, *, on_cpu: bool) -> str:
    """Device and versions in words. on_cpu: whether GPUs of the machine were not used."""
    devices = ", ".join(dict.fromkeys(stamp["device"]))
    if on_cpu and not devices.startswith("CPU"):
        devices = f"the CPU of a machine with {devices}"
    versions = ", ".join(f"{name} {stamp[name]}" for name in PACKAGES)
    return f"{devices}; {versions}; numerics version {numerics}"
