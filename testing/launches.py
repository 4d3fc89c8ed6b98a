"""What the scripts of examples/ launch, without a cluster and without training.

Slurm, torchrun and nvidia-smi are stood in for by shell scripts of the same names.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from testing.worlds.launch import ROOT, SCRIPTS

EXAMPLES = ROOT / "examples"
MODELS = sorted(path.stem for path in (EXAMPLES / "models").glob("*.sh"))


# A node of eight GPUs. torchrun writes down its words, and does what TORCHRUN says.
_STAND_INS = {
    "nvidia-smi": "seq 8",
    "torchrun": 'printf "%s\\0" "$@" > "$RUN_DIR/words"; eval "${TORCHRUN:-}"',
    "scontrol": 'echo "scontrol $*" >> "$RUN_DIR/log"; if [[ $1 == show ]]; then echo n1; fi',
    "scancel": 'echo "scancel $*" >> "$RUN_DIR/log"; kill -USR1 "$(cat "$RUN_DIR/step")"',
    "sleep": "exit",
    # The command that srun runs begins with bash, and becomes examples/launch.sh.
    "srun": """
        printf "%s\\0" "$@" > "$RUN_DIR/srun"
        while [[ $1 != bash ]]; do shift; done
        echo $$ > "$RUN_DIR/step"
        SLURM_PROCID=0 exec "$@"
    """,
}


def with_stand_ins(folder: Path) -> Path:
    """`folder`, which gets the folders bin, of the stand-ins, and run."""
    for name in ("bin", "run"):
        (folder / name).mkdir()
    for name, body in _STAND_INS.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    return folder


def environment(folder: Path, script: Path, **others: str) -> dict[str, str]:
    nodes = directives(script).get("nodes", "1")
    own = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "RUN_DIR": str(folder / "run"),
        "DATA": "mock",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NAME": script.stem,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_JOB_NODELIST": f"n[1-{nodes}]",
        "SLURMD_NODENAME": "n1",
        "PYTHON": sys.executable,
    }
    return own | others


def directives(script: Path) -> dict[str, str]:
    """The options of the #SBATCH lines by name; "" for those without a value."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.M)
    return {name: value for name, value in found}


def start(folder: Path, script: Path, *flags: str, **others: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(script), *flags],
        cwd=ROOT,
        env=environment(folder, script, **others),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def words(folder: Path) -> list[str]:
    return (folder / "run" / "words").read_text().split("\0")[:-1]


def launches(parent: Path) -> dict[str, tuple[int, list[str]]]:
    """The number of processes and Megatron's flags of each launch, by the script's name.

    parent: where the folders of the launches are made.
    """
    found = {}
    for model in MODELS:
        script = EXAMPLES / "slurm" / f"{model}.sbatch"
        folder = _made(parent / model)
        start(folder, script).wait()
        nodes = int(directives(script)["nodes"])
        found[model] = (8 * nodes, flags_of(words(folder), nodes))
    folder = _made(parent / "kubernetes")
    container, pods = pytorch_job()
    values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    values |= {"RANK": "0", "NODE_ADDRESS": "10.0.0.1", "RUN_DIR": str(folder / "run")}
    own = environment(folder, EXAMPLES / "launch.sh") | values | {"DATA": "mock"}
    subprocess.run([*container["command"], *container["args"]], cwd=ROOT, env=own)
    assert values["NODES"] == str(pods)
    found["kubernetes"] = (8 * pods, flags_of(words(folder), pods))
    return found


def _made(folder: Path) -> Path:
    folder.mkdir()
    return with_stand_ins(folder)


def pytorch_job() -> tuple[dict[str, Any], int]:
    """The container of the PyTorchJob, and the number of its pods."""
    job = yaml.safe_load((EXAMPLES / "kubernetes" / "llama_8b.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    [container] = replicas["Master"]["template"]["spec"]["containers"]
    assert replicas["Worker"]["template"] == replicas["Master"]["template"]
    return container, sum(each["replicas"] for each in replicas.values())


def flags_of(launched: list[str], nodes: int) -> list[str]:
    """Megatron's flags among torchrun's words; asserts that torchrun has its own."""
    at = launched.index("pretrain_gpt.py")
    own = launched[:at]
    assert own[own.index("--nproc-per-node") + 1] == "8"
    assert own[own.index("--nnodes") + 1] == str(nodes)
    assert ("--standalone" in own) == (nodes == 1)
    assert nodes == 1 or own[own.index("--rdzv-backend") + 1] == "c10d"
    return launched[at + 1 :]


def parsed(launches: Mapping[str, tuple[int, list[str]]]) -> dict[str, Any]:
    """Megatron's arguments of each launch by name, or the text of the refusal."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "parse_launches.py"],
        input=json.dumps(list(launches.values())),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(launches), done.stderr[-3000:]
    return dict(zip(launches, lines, strict=True))
