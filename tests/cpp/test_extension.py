"""What is said where the extension in C++ cannot be built, or a recipe cannot run in it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megatron_fp4 import get_recipe
from megatron_fp4.cpp import extension, lowering
from megatron_fp4.kernels.launch import Launch
from megatron_fp4.linear import execute_by, in_python
from megatron_fp4.mcore.model import executor
from megatron_fp4.mcore.model.executor import Started
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.recipes import uniform_recipes
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target, gpu_named
from testing.kernels.compiling import compiled_launch

linears = import_module("megatron_fp4.linear")  # the package has a function of that name
BF16 = torch.bfloat16
SETTING = Setting(256, 256, 256, BF16, gpu_named("sm_90"), BF16, main_grad=torch.float32)
UNIFORM = str(Path(__file__).with_name("uniform.yaml"))  # no kernel rounds to its grid
IN_CPP = "linears run in C++ once their calls have been recorded, in the first steps"


def plans(*recipes: str) -> list[LinearPlan]:
    return [compile_plan(get_recipe(recipe), SETTING) for recipe in recipes]


def a_run(**args: Any) -> Any:
    """A run, with the arguments that the executor asks for."""
    given = {"fp4_executor": "auto", "cuda_graph_impl": "none", "tensor_model_parallel_size": 1}
    return Namespace(args=Namespace(**given | args), monitor=Namespace(), recipes=[])


# --- building ----------------------------------------------------------------------------------


@pytest.fixture
def own_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of the sources of an extension of another name, which is built in a new folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setattr(extension, "SOURCES", tmp_path)
    monkeypatch.setattr(extension, "_version", lambda: "of_a_test")
    (tmp_path / "program.cpp").write_text("int main( { return 0; }\n")
    extension.load.cache_clear()
    yield tmp_path
    extension.load.cache_clear()


def why_not() -> str:
    """Why the extension cannot be built."""
    with pytest.raises(extension.CannotBuild) as caught:
        extension.start()
    assert "\n" not in str(caught.value) and linears._execute is in_python
    return str(caught.value)


def test_a_compiler_that_is_not_there_is_named(
    own_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "nosuchcompiler")
    why = why_not()
    assert "nosuchcompiler" in why and "not found" in why and "-MMD" not in why
    assert why.endswith("; install a C++ compiler, ninja and Python's headers, or name another "
                        "compiler by CXX")  # fmt: skip


def test_a_compiler_that_does_not_run_is_named(
    own_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks the compiler for its version before it builds."""
    broken = own_build / "broken-compiler"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    why = why_not()
    assert "broken-compiler" in why and why.endswith("or name another compiler by CXX")


def test_the_compilers_own_error_is_told(own_build: Path) -> None:
    why = why_not()
    assert "program.cpp:1:" in why and "error:" in why and "-MMD" not in why


def test_a_machine_without_ninja_is_told(own_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not().startswith("Ninja is required to load C++ extensions")


def test_a_folder_that_cannot_be_made_is_told(
    own_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(own_build / "program.cpp"))
    why = why_not()
    assert "program.cpp" in why and why.endswith("; name another folder by TORCH_EXTENSIONS_DIR")


def test_a_compiler_that_says_nothing_and_a_message_of_one_line() -> None:
    ninja = "Error building extension 'x': [1/2] c++ -MMD\nFAILED: [code=1] a.o \nc++ -MMD a\n"
    assert extension._cause(ninja + "Killed\nninja: build stopped") == "Killed"
    assert (
        extension._cause(ninja + "In file included from a\nb.h:3: error: c\n") == "b.h:3: error: c"
    )
    assert extension._cause("undefined symbol: f") == "undefined symbol: f"
    assert extension._cause("Error building\nFAILED: a.o") == "FAILED: a.o"
    assert extension._cause("") == "the compiler said nothing"


# --- a run -------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_flag_or_a_machine_without_a_gpu_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(extension, "start", lambda: pytest.fail("it was started"))
    on_request = executor.start(a_run(fp4_executor="python"), plans("tetrajet"))
    assert on_request == Started("--fp4-executor python")
    assert executor.start(a_run(), plans("tetrajet")) == Started()
    assert executor.lines(a_run(), [Started()]) == []


def test_a_failed_build_is_a_line_of_the_start_table(
    gpu: None, own_build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "nosuchcompiler")
    started = executor.start(a_run(), plans("tetrajet"))
    [said] = executor.lines(a_run(), [Started(), started])
    assert said.startswith("linears run in Python: the executor in C++ cannot be built: ")
    assert "nosuchcompiler: not found; install" in said


@pytest.mark.slow
def test_a_build_runs_linears_in_cpp(gpu: None) -> None:
    run = a_run()
    try:
        started = executor.start(run, plans("tetrajet", "mxfp4"))
        assert linears._execute is not in_python and run.monitor.from_cpp is not None
    finally:
        execute_by(in_python)
    assert executor.lines(run, [started]) == [IN_CPP]


def said_on_a_gpu(monkeypatch: pytest.MonkeyPatch, appended: str) -> list[str]:
    """The lines of the start table where Triton compiles kernels for a GPU. appended: to the
    parameters of each."""

    def compiled(self: Launch, device: int, aligned: bool) -> Any:
        ptx = compiled_launch(self, 90)["ptx"] + appended
        return Namespace(function=0, asm={"ptx": ptx}, metadata=Namespace(num_warps=4, shared=0))

    def start() -> Any:
        execute_by(lambda *given: None)
        return Namespace(Tallies=object)

    monkeypatch.setattr(Launch, "compiled", compiled)
    monkeypatch.setattr(extension, "start", start)
    on_gpu = replace(SETTING, target=Target("cuda", (9, 0), torch.device("cuda", 0)))
    lowering.layout_problem.cache_clear()
    plan = compile_plan(get_recipe("tetrajet"), on_gpu)
    return executor.lines(a_run(), [executor.start(a_run(), [plan])])


def test_a_layout_that_is_not_known_is_a_line_of_the_start_table(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer = ".param .u64 probe_kernel_param_6\n"  # one more than Triton 3.6 appends
    try:
        [said] = said_on_a_gpu(monkeypatch, pointer)
        assert linears._execute is in_python
        # Control: as Triton lays them out.
        assert said_on_a_gpu(monkeypatch, "") == [IN_CPP]
        assert linears._execute is not in_python
    finally:
        execute_by(in_python)
        lowering.layout_problem.cache_clear()
    assert said == (
        "linears run in Python: the executor in C++ cannot launch kernels: Triton "
        f"{triton.__version__} lays out the arguments of kernels in a way that is not known here: "
        "install a version that README.md lists"
    )


@pytest.mark.parametrize(
    "target", [gpu_named("sm_90"), Target("cpu"), Target("rocm", device=torch.device("cuda", 0))]
)
def test_no_kernel_is_compiled_where_none_runs(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "compiled", lambda *given: pytest.fail("it was compiled"))
    assert lowering.layout_problem(target) is None


@pytest.mark.parametrize("recipe", uniform_recipes())
def test_every_recipe_runs_in_cpp(recipe: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "start", lambda: Namespace(Tallies=object))
    assert executor.lines(a_run(), [executor.start(a_run(), plans(recipe))]) == [IN_CPP]


def test_the_table_says_what_runs_in_graphs(gpu: None) -> None:
    started = Started(refusals=frozenset({("tetrajet", None)}))
    [line] = executor.lines(a_run(cuda_graph_impl="local"), [started])
    assert line.startswith("linears run in CUDA graphs; outside of them in C++ once ")


def test_recipes_that_never_run_in_cpp_are_named(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "start", lambda: Namespace(Tallies=object))
    said = executor.lines(a_run(), [executor.start(a_run(), plans(UNIFORM))])
    why = "PyTorch draws the random bits of dy in dgrad"
    assert said == [f"linears of recipe uniform run in Python: {why}"]


def test_recipes_of_other_ranks_and_linears_are_told_too(gpu: None) -> None:
    why = "PyTorch draws"
    ranks = [
        Started(refusals=frozenset({("tetrajet", None)})),
        Started(refusals=frozenset({("tetrajet", why), ("ue5m3", why)})),
    ]
    some = f"some linears of recipe tetrajet run in Python: {why}"
    all_of = f"linears of recipe ue5m3 run in Python: {why}"
    assert executor.lines(a_run(), ranks) == [IN_CPP, some, all_of]


@pytest.mark.parametrize(
    "started", [Started("it failed"), Started(refusals=frozenset({("a", "b")}))]
)
def test_graphs_are_advised_where_linears_stay_in_python(
    started: Started, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under tensor parallelism of two; not where they run in C++."""
    monkeypatch.setattr(executor.cuda_graphs, "captured_layers", lambda args, recipes: [])
    two = a_run(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    advice = "--cuda-graph-impl local may be faster"
    in_cpp = Started(refusals=frozenset({("a", None)}))
    for one, is_advised in ((started, True), (in_cpp, False)):
        lines = executor.lines(two, [one])
        assert any(line.startswith(advice) for line in lines) == is_advised
