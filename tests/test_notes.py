"""Tables and figures in docs/ are the committed results."""

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from benchmarks import (
    host,
    host_linear,
    kernel_counters,
    linear,
    linear_kernels,
    method_costs,
    metrics_costs,
    mlp,
    parallel_step,
    peers,
    quantize_kernels,
    training_step,
)
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.recipes import uniform_recipes
from tests.test_readme import weights_gradients_and_optimizer, with_fp8_input

ROOT = Path(__file__).parents[1]
PAGES: dict[str, tuple[str, Any]] = {
    "quantize_kernels-fused": ("docs/notes/quantize-kernels.md", quantize_kernels),
    "kernel_counters": ("docs/notes/quantize-kernels.md", kernel_counters),
    "host_linear": ("docs/notes/host.md", host_linear),
    "host_linear-before": ("docs/notes/host.md", host_linear),
    "linear-te": ("docs/hopper.md", linear),
    "mlp": ("docs/hopper.md", mlp),
    "recipes-step": ("docs/hopper.md", training_step),
    "linear_kernels": ("docs/hopper.md", linear_kernels),
    "host-all": ("docs/notes/host.md", host),
    "host-ten": ("docs/notes/host.md", host),
    "te-step": ("docs/hopper.md", training_step),
    "fused-step": ("docs/hopper.md", training_step),
    "fused-step-before": ("docs/hopper.md", training_step),
    "fused-step-decoded": ("docs/hopper.md", training_step),
    "host": ("docs/notes/host.md", host),
    "host-operators": ("docs/notes/host.md", host),
    "training_step": ("docs/hopper.md", training_step),
    "training_step-four": ("docs/hopper.md", training_step),
    "parallel-two": ("docs/hopper.md", parallel_step),
    "parallel-two-graphs": ("docs/hopper.md", parallel_step),
    "parallel-four": ("docs/hopper.md", parallel_step),
    "parallel-four-upstream": ("docs/hopper.md", parallel_step),
    "parallel-te": ("docs/hopper.md", parallel_step),
    "parallel-te-others": ("docs/hopper.md", parallel_step),
    "parallel-te-beside": ("docs/hopper.md", parallel_step),
    "parallel-four-te": ("docs/hopper.md", parallel_step),
    "parallel-four-beside": ("docs/hopper.md", parallel_step),
    "parallel-fp8": ("docs/hopper.md", parallel_step),
    "few-bits-one": ("docs/communication.md", parallel_step),
    "few-bits-two": ("docs/communication.md", parallel_step),
    "few-bits-four": ("docs/communication.md", parallel_step),
    "few-bits-bf16": ("docs/communication.md", parallel_step),
    "few-bits-two-bf16": ("docs/communication.md", parallel_step),
    "few-bits-four-bf16": ("docs/communication.md", parallel_step),
    "few-bits-ddp": ("docs/communication.md", parallel_step),
    "few-bits-aware": ("docs/communication.md", parallel_step),
    "host-recorded": ("docs/notes/host.md", host),
    "parallel_step": ("docs/notes/host.md", parallel_step),
    "parallel_step-before": ("docs/notes/host.md", parallel_step),
    "parallel_step-after": ("docs/notes/host.md", parallel_step),
    "parallel_step-apart": ("docs/notes/host.md", parallel_step),
    "parallel_step-graphs": ("docs/notes/host.md", parallel_step),
    "peers": ("docs/hopper.md", peers),
    "method_costs": ("docs/notes/costs.md", method_costs),
    "metrics_costs": ("docs/notes/costs.md", metrics_costs),
}
GRAPHS = "tetrajet --cuda-graph-impl local"


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def steps(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a parallel_step result by layout and recipe."""
    return {(row["layout"], row["name"]): row for row in result(name)["rows"]}


def says(page: str, figures: list[str]) -> None:
    """Asserts that a page has these texts, whatever its line breaks."""
    text = " ".join((ROOT / page).read_text().split())
    for said in figures:
        assert said in text, said


def quantize_ms(row: dict[str, Any]) -> float:
    return row["gpu_ms"]["quantize"]


def shares(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a quantize_kernels result on the first matrix, by kernel."""
    rows = result(name)["rows"]
    return {row["kernel"]: row for row in rows if row["shape"] == rows[0]["shape"]}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_s_figures_are_the_committed_result(name: str) -> None:
    page, benchmark = PAGES[name]
    found = result(name)
    stamp = found["stamp"]
    assert set(stamp["device"]) == {"NVIDIA H200"} and len(stamp["commit"]) == 40
    assert "\n".join(benchmark.table(found["rows"])) in (ROOT / page).read_text()


# --- figures in running text ----------------------------------------------------------------------


def of_memory_in_training() -> list[str]:
    same = weights_gradients_and_optimizer()
    measured, _, low = (row["peak_gib"] - same for row in result("fused-step")["rows"])
    return [
        f"takes {low / measured:.2f} of BF16's memory and "
        f"{with_fp8_input()[1]:.2f} of that of BF16 "
        "with `--activation-func-fp8-input-store`, without weights, gradients and optimizer"
    ]


def of_graphs() -> list[str]:
    four = steps("parallel-four")
    tensor, both = (
        [f"{four[layout, name]['ms']:.0f} ms" for name in (GRAPHS, "tetrajet")]
        for layout in ("tp4-sp", "tp2-sp-pp2")
    )
    return [
        f"takes {tensor[0]} a step with graphs and {tensor[1]} without, and under TP2 with PP2 "
        f"{both[0]} and {both[1]}"
    ]


IN_BF16 = {"four-over-six", "nvfp4-nvidia", "quartet-2", "ue5m3"}


def of_recipes_on_the_host() -> list[str]:
    rows = {row["name"]: row for row in result("host-all")["rows"]}
    assert {*rows} == {"upstream bf16", "bf16", *uniform_recipes()}
    times = {
        name: max(rows[name][f"times linear_{linear}"] for linear in ("fc1", "fc2"))
        for name in uniform_recipes()
    }
    in_bf16 = [
        rows[name][f"times linear_{linear}"] for name in IN_BF16 for linear in ("fc1", "fc2")
    ]
    fast = {name: each for name, each in times.items() if name not in IN_BF16}
    assert max(times.values()) < 2
    again = result("host-ten")["rows"]
    assert all(row[f"times linear_{linear}"] < 2 for row in again for linear in ("fc1", "fc2"))
    alone = [
        row[f"linear_{linear}"] / row[f"torch linear_{linear}"]
        for name in ("host", "host-recorded", "host-all")
        for row in result(name)["rows"][:1]
        for linear in ("fc1", "fc2")
    ]
    [there] = {
        f"{again[0][f'linear_{n}'] / again[0][f'torch linear_{n}']:.1f}" for n in ("fc1", "fc2")
    }
    plain, ours = again[0], next(row for row in again if row["name"] == "tetrajet")
    more = [[f"{ours[f'{of}linear_{n}'] / plain[f'{of}linear_{n}']:.1f}" for n in ("fc1", "fc2")]
            for of in ("", "torch ")]  # fmt: skip
    return [
        f"`tetrajet` takes {more[0][0]} and {more[0][1]} times as many microseconds as Megatron's "
        f"BF16 linear, in a process whose torch linear takes {more[1][0]} and {more[1][1]} times",
        f"Megatron's BF16 linear takes {there} times as long as torch's there, as in the first of "
        f"the runs above, and {min(alone):.1f} to {max(alone):.1f} times in the later ones",
        f"take at most {max(fast.values()):.2f} times the time of the faster BF16 linear",
        f"take {min(in_bf16):.1f} to {max(in_bf16):.1f} times",
    ]


def of_the_host() -> list[str]:
    before, after, now = (steps(f"parallel_step{part}") for part in ("-before", "-after", ""))
    ours, bf16, captured = ("tp2-sp", "tetrajet"), ("tp2-sp", "bf16"), ("tp2-sp", GRAPHS)
    graphs = steps("parallel_step-graphs")[captured]
    four = now["tp4-sp", "tetrajet"]
    along = [
        shares(f"quantize_kernels{part}")["stochastic, along rows"] for part in ("-in-memory", "")
    ]
    anew = (quantize_ms(graphs) - quantize_ms(after[ours])) / graphs["ms"]
    two, last = steps("parallel-two"), steps("parallel-four")
    over_four, both = (
        [f"{last[layout, name]['ms']:.0f}" for name in (GRAPHS, "tetrajet")]
        for layout in ("tp4-sp", "tp2-sp-pp2")
    )
    tensor, pipeline = (
        [f"{two[layout, name]['ms']:.0f}" for name in (GRAPHS, "tetrajet")]
        for layout in ("tp2-sp", "pp2")
    )
    return [
        f"takes {tensor[0]} ms with graphs and {tensor[1]} ms without, and PP2 {pipeline[0]} and "
        f"{pipeline[1]} ms",
        f"TP4 with SP takes {over_four[0]} ms with graphs and {over_four[1]} ms without, and TP2 "
        f"with SP and PP2 {both[0]} and {both[1]} ms",
        f"took {now['tp4-sp', GRAPHS]['ms']:.0f} and {four['ms']:,.0f} ms under TP4",
        f"which took {now[ours]['ms']:,.0f} ms in Python, takes {two[ours]['ms']:.0f} ms, and is "
        f"{two[ours]['ratio']:.2f} times as fast as BF16. Under PP2 it is "
        f"{two['pp2', 'tetrajet']['ratio']:.2f} times as fast",
        f"took {before[ours]['ms']:,.0f} ms before and {after[ours]['ms']:.0f} ms after; BF16 took "
        f"{after[bf16]['ms']:.0f} ms",
        f"takes {now[ours]['ms']:,.0f} ms and TP4 with SP {four['ms']:,.0f} ms",
        f"{now[ours]['ratio']:.2f} and {four['ratio']:.2f} times as fast as the fastest BF16",
        f"takes {now[captured]['ms']:.0f} ms and {now['tp4-sp', GRAPHS]['ms']:.0f} ms",
        f"took {graphs['ms']:.0f} ms with graphs. This is {after[bf16]['ms'] / graphs['ms']:.2f} "
        f"times as fast as BF16 without graphs, and {graphs['ratio']:.2f} times",
        f"({along[0]['share']:.0%} of the bandwidth of a copy and not {along[1]['share']:.0%}",
        f"takes {anew:.0%} of a step here",
    ]


def of_the_quantize_kernels() -> list[str]:
    found, before = shares("quantize_kernels-fused"), shares("quantize_kernels-one-draw")
    both, two = found["stochastic, both"], found["stochastic, both, two draws"]
    copied = both["us"] * both["share"]  # the bytes of this kernel, at the bandwidth of a copy
    carried, below = "stochastic, both, with E5M2", shares("quantize_kernels-below")
    return [
        f"and {copied:.0f} µs of memory traffic, and take {both['us']:.0f} µs",
        f"the share rises from {100 * two['share']:.0f} to {both['share']:.0%} of a copy",
        f"tiles below each other take {both['us']:.1f} µs, and tiles beside each other took "
        f"{before['stochastic, both']['us']:.1f} µs",
        f"tiles beside each other take {found[carried]['us']:.1f} µs, and tiles below each other "
        f"took {below[carried]['us']:.1f} µs",
    ]


def of_hardware_counters() -> list[str]:
    rows = {row["case"]: row["shares"] for row in result("kernel_counters")["rows"]}

    def used(unit: str, cases: list[str]) -> str:
        shares = sorted(rows[case][unit] for case in cases)
        return f"{shares[0]:.0f}% to {shares[-1]:.0f}%"

    along = "along rows", "along columns"
    nearest, alone = ([f"{how}, {name}" for name in along] for how in ("nearest", "stochastic"))
    turned = [case for case in rows if case.startswith("Hadamard")]
    rest = [case for case in rows if case not in (*nearest, *alone, *turned)]
    idle = [100 - rows[case]["issue"] for case in rest]
    memory = [f"{rows[case]['memory']:.0f}%" for case in nearest]
    busy = max(share for case in rest for unit, share in rows[case].items() if unit != "warps")
    assert max(rows[case]["warps"] for case in rest) / 100 * 16 < 4
    return [
        f"it uses {memory[0]} and {memory[1]} of its bandwidth",
        f"{used('ALU', alone)} of ALU, {used('issue', alone)} of the issue slots, "
        f"{used('memory', alone)} of memory",
        f"no unit is busy for more than {busy:.0f}%",
        f"In {min(idle):.0f}% to {max(idle):.0f}% of the cycles none of them is ready",
        f"use {used('issue', turned)} of the issue slots",
        f"of which they use only {used('memory', turned)}",
    ]


def of_rule_mse() -> list[str]:
    names = "nearest, along rows", "nearest, both"
    found, before = shares("quantize_kernels-mse"), shares("quantize_kernels-mse-before")
    rows, both = (found[f"{name}, rule mse"]["us"] for name in names)
    times = rows / found[names[0]]["us"], both / found[names[1]]["us"]
    old = (before[f"{name}, rule mse"]["us"] for name in names)
    return [
        f"takes {rows:.1f} µs along the rows and {both:.1f} µs in both directions, "
        f"{times[0]:.1f} and {times[1]:.1f} times nearest rounding",
        "with squares as integers, took {:.1f} and {:.1f} µs".format(*old),
    ]


def of_bytes() -> list[str]:
    hidden = result("bytes")["shape"]["hidden"]
    outliers = 2 * OutlierClamp().kept(hidden)
    token = hidden // 2 + 4 + 4 * outliers  # codes, a scale, and of outliers values and places
    return [
        f"there are {outliers} of them, {outliers // 2} at either end",
        f"{token} bytes a token, {token / (2 * hidden):.3f} of the {2 * hidden:,} in BF16",
    ]


def of_checkpoints() -> list[str]:
    return [f"each at {result('integrity')['median'] / 1e9:.1f} GB/s on an AMD EPYC core"]


def of_methods() -> list[str]:
    rows = {row["name"]: row for row in result("method_costs")["rows"]}
    plain, ema, ramped, calibrated, offloaded = rows.values()
    more = calibrated["peak_gib"] - ramped["peak_gib"]
    return [
        f"{offloaded['peak_gib']:.1f} GiB in place of {calibrated['peak_gib']:.1f}",
        f"The first calibration of a run takes {offloaded['first_calibration_s']:.1f} s beside",
        f"and a later one {offloaded['calibration_s']:.1f} s",
        f"takes {ema['update ms'] / ema['ms']:.1%} of the step",
        f"torch's AdamW takes {plain['optimizer ms']:.0f} ms here",
        f"one kernel, which takes {ramped['update ms']:.0f} ms",
        f"{calibrated['calibration_s']:.1f} s beside its steps, and {more:.0f} GiB for copies",
    ]


def of_metrics() -> list[str]:
    rows = result("metrics_costs")["rows"]
    mean = metrics_costs.mean(rows)
    followed = [row["sampling ms"] for row in rows]
    error = stdev(followed) / len(rows) ** 0.5
    assert (mean["sampling ms"] + 2 * error) / mean["plain ms"] < 0.003
    [linears, microbatches] = 4 * 8, 4  # of 8 layers, and of 8 sequences in microbatches of 2
    operands = linears * (4 * microbatches + 2)
    report = mean["report ms"]
    return [
        f"The rows are {len(rows)} cycles of ten steps",
        f"A report takes {report:.0f} ms, {report / 100 / mean['plain ms']:.2%} of 100 steps",
        f"is {mean['sampling ms']:.1f} ms, with a standard error of {error:.1f}",
        f"each of {operands} operands",
        f"the host {report / operands:.1f} ms for each operand",
    ]


FIGURES: dict[str, list[Any]] = {
    "docs/notes/costs.md": [of_methods, of_metrics],
    "docs/notes/host.md": [of_the_host, of_recipes_on_the_host],
    "docs/notes/quantize-kernels.md": [
        of_the_quantize_kernels,
        of_hardware_counters,
        of_rule_mse,
    ],
    "docs/communication.md": [of_bytes],
    "docs/training.md": [of_checkpoints, of_graphs, of_memory_in_training],
}


@pytest.mark.parametrize(
    ("page", "figures"), [(page, each) for page, found in FIGURES.items() for each in found]
)
def test_figures_in_running_text_are_the_committed_result(page: str, figures: Any) -> None:
    says(page, figures())
