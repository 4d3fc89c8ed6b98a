"""Releases of Megatron from the package index, laid out as checkouts: patched and run, or refused.

Upstream's own pretrain_gpt.py, which no wheel has, comes from its repository: the environment
variable MEGATRON_LM may name another copy of that, as a folder or a URL.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import megatron.core
import pytest

from testing.worlds.launch import MOCK_DATA, ROOT, TINY, Result, result_of, train
from testing.worlds.own_megatron import OWN

pytestmark = pytest.mark.outside

TETRAJET = ("--ffn-hidden-size", "128", "--bf16", "--fp4-recipe", "tetrajet")
REFUSED = {
    "0.16.1": "its wheel has no megatron.training",
    "0.17.1": "its pretrain parses the command line itself",
    "0.18.2": "it has no GPTModelConfig",
}
WHEELS = ("0.19.0", "0.19.2")
MEGATRON_LM = "https://github.com/NVIDIA/Megatron-LM"
TAG, TAGS_NAME = "core_v0.19.0", "0.19.1"  # its package_info.py is ahead of it
APPLY = str(ROOT / "patches" / "apply.py")


def release(name: str, folder: Path) -> Path:
    """The wheel of a release, unpacked; skips the test if pip cannot download it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder / "wheel"), f"megatron-core=={name}"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"pip cannot download megatron-core {name}: {done.stderr.strip()[-200:]}")
    (wheel,) = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "checkout")
    return folder / "checkout"


def contents(folder: Path) -> dict[str, bytes]:
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {str(f): f.read_bytes() for f in files}


def torchrun(*words: str, paths: list[Path], processes: int = 1) -> Result:
    """Runs a script or module in a torchrun world whose Python finds packages in `paths`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(processes), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, [*paths, ROOT]))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return result_of(done)


@pytest.mark.parametrize("name", WHEELS)
def test_a_patched_release_trains_as_pretrain_gpt_does(name: str, tmp_path: Path) -> None:
    """By torchrun and a user's script alone; without a recipe it trains too."""
    checkout = release(name, tmp_path)
    before = contents(checkout)
    subprocess.run([sys.executable, APPLY, str(checkout), "--yes"], check=True)
    flags = (*TINY, *MOCK_DATA, *TETRAJET)
    script = str(OWN / "provider.py")
    patched = torchrun(script, *flags, paths=[checkout])
    assert patched.status == 0, patched.output[-4000:]
    assert patched.losses == train(1, *TETRAJET).losses and len(patched.losses) == 4
    plain = torchrun(script, *flags[:-2], paths=[checkout])
    assert plain.status == 0 and plain.losses != patched.losses
    refused = torchrun(script, *flags, "--fp4-recipe", "nonsense", paths=[checkout])
    assert refused.status == 1 and "megatron-fp4: error: unknown recipe" in refused.output
    assert not refused.has_traceback
    ours = torchrun(str(ROOT / "pretrain_gpt.py"), *flags, paths=[checkout])  # in it too
    assert ours.status == 0 and ours.losses == patched.losses, ours.output[-4000:]
    subprocess.run([sys.executable, APPLY, str(checkout), "--revert", "--yes"], check=True)
    assert contents(checkout) == before


@pytest.mark.parametrize("name", REFUSED)
def test_an_older_release_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    checkout = release(name, tmp_path)
    refused = subprocess.run(
        [sys.executable, APPLY, str(checkout), "--yes"], capture_output=True, text=True
    )
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert f"is Megatron-core {name}: {REFUSED[name]}" in refused.stderr
    ran = torchrun("-m", "megatron_fp4.run", str(OWN / "provider.py"), paths=[checkout])
    assert f"Megatron-core {name} in {checkout}" in ran.output and ran.status == 1


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the tag, with the helper that the installed wheel compiled."""
    folder = tmp_path_factory.mktemp("upstream") / "Megatron-LM"
    source = os.environ.get("MEGATRON_LM", MEGATRON_LM)
    clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", TAG]
    done = subprocess.run([*clone, source, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"git cannot clone {source}: {done.stderr.strip()[-200:]}")
    datasets = Path("megatron", "core", "datasets")
    installed = Path(megatron.core.__file__).parents[2] / datasets
    for helper in installed.glob("helpers_cpp*.so"):
        shutil.copy(helper, folder / datasets)
    return folder


def test_upstreams_pretrain_gpt_repeats_ours(upstream: Path) -> None:
    """With layers that have the norm and attention of ours, and all else upstream's."""
    flags = (*TINY, *MOCK_DATA, *TETRAJET, "--no-create-attention-mask-in-dataloader")
    spec = ("--spec", "testing.own_megatron.layers", "block")
    script = ("-m", "megatron_fp4.run", str(upstream / "pretrain_gpt.py"))
    for processes, layout in (
        (1, ()),
        (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        (2, ("--pipeline-model-parallel-size", "2")),
    ):
        run = torchrun(*script, *flags, *spec, *layout, paths=[], processes=processes)
        assert run.status == 0, run.output[-4000:]
        assert run.losses == train(processes, *TETRAJET, *layout).losses and len(run.losses) == 4
        assert f"pretrain_gpt.py with Megatron-core {TAGS_NAME} in {upstream}" in run.output


def test_upstreams_own_layers_follow_a_recipe(upstream: Path) -> None:
    script = ("-m", "megatron_fp4.run", str(upstream / "pretrain_gpt.py"))
    run = torchrun(*script, *TINY, *MOCK_DATA, *TETRAJET, paths=[])
    assert run.status == 0 and "decoder.layers.*.mlp.linear_fc1" in run.output, run.output[-4000:]
    assert run.losses == pytest.approx(train(1, *TETRAJET).losses, rel=1e-3)


def test_upstreams_checkout_is_patched(upstream: Path) -> None:
    """Its pretrain_gpt.py then follows a recipe by torchrun alone."""
    subprocess.run([sys.executable, APPLY, str(upstream), "--yes"], check=True)
    flags = (*TINY, *MOCK_DATA, *TETRAJET, "--no-create-attention-mask-in-dataloader")
    spec = ("--spec", "testing.own_megatron.layers", "block")
    run = torchrun(str(upstream / "pretrain_gpt.py"), *flags, *spec, paths=[])
    assert run.status == 0 and run.losses == train(1, *TETRAJET).losses, run.output[-4000:]
    subprocess.run([sys.executable, APPLY, str(upstream), "--revert", "--yes"], check=True)
    state = ["git", "-C", str(upstream), "diff", "--stat"]
    assert subprocess.run(state, check=True, capture_output=True).stdout == b""
