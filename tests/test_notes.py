"""Tables and figures in docs/ are the committed results."""

import json
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from benchmarks import (
    host,
    host_linear,
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
from megatron_fp4.recipes import list_recipes
from tests.test_readme import LOW, weights_gradients_and_optimizer, with_fp8_input

ROOT = Path(__file__).parents[1]
PAGES: dict[str, tuple[str, Any]] = {
    "quantize_kernels-fused": ("docs/notes/quantize-kernels.md", quantize_kernels),
    "host_linear": ("docs/notes/host.md", host_linear),
    "host_linear-before": ("docs/notes/host.md", host_linear),
    "linear-te": ("docs/hopper.md", linear),
    "mlp": ("docs/hopper.md", mlp),
    "fused-step-others": ("docs/hopper.md", training_step),
    "linear_kernels": ("docs/hopper.md", linear_kernels),
    "host-all": ("docs/notes/host.md", host),
    "te-step": ("docs/hopper.md", training_step),
    "fused-step": ("docs/hopper.md", training_step),
    "fused-step-before": ("docs/hopper.md", training_step),
    "fused-step-decoded": ("docs/hopper.md", training_step),
    "host": ("docs/notes/host.md", host),
    "host-operators": ("docs/notes/host.md", host),
    "training_step": ("docs/hopper.md", training_step),
    "training_step-four": ("docs/hopper.md", training_step),
    "parallel-two": ("docs/hopper.md", parallel_step),
    "parallel-te": ("docs/hopper.md", parallel_step),
    "few-bits-one": ("docs/communication.md", parallel_step),
    "few-bits-two": ("docs/communication.md", parallel_step),
    "few-bits-bf16": ("docs/communication.md", parallel_step),
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


def of_a_linear() -> list[str]:
    rows = {(row["in"], row["out"], row["recipe"]): row for row in result("linear-te")["rows"]}
    ours = {key[:2]: row for key, row in rows.items() if key[2] == "tetrajet"}
    more = [f"{ours[at]['ms'] / ours[at]['floor ms'] - 1:.0%} more" for at in linear.SHAPES]
    bf16 = {at: min(rows[(*at, name)]["ms"] for name in ("bf16", "te bf16")) for at in ours}
    gemms = [bf16[at] / row["products ms"] for at, row in ours.items()]
    beside = {
        name: [row["ms"] / rows[(*at, name)]["ms"] for at, row in ours.items()]
        for name in ("fp8", "te fp8 delayed")
    }
    low, high = (
        {name: f"{pick(found):.2f}" for name, found in beside.items()} for pick in (min, max)
    )
    return [
        f"it takes {more[0]} than its floor at 4096 × 4096, {more[1]} at 4096 × 14336, "
        f"{more[2]} at 14336 × 4096 and {more[3]} at 8192 × 8192",
        f"The FP8 products are {min(gemms):.1f} to {max(gemms):.1f} times as fast as BF16's",
        f"takes {low['fp8']} to {high['fp8']} of the time of `fp8`",
        f"`tetrajet` takes {low['te fp8 delayed']} to {high['te fp8 delayed']} times its time",
    ]


def of_a_linear_s_kernels() -> list[str]:
    over: dict[str, list[float]] = {}  # the parts of what is above the floor, by shape
    slower: dict[str, list[float]] = {}
    for shape in linear.SHAPES:
        rows = [r for r in result("linear_kernels")["rows"] if (r["in"], r["out"]) == shape]
        above = sum(row["us"] - row["floor us"] for row in rows)
        for word in ("from codes", "dY for", "corrections", linear_kernels.BETWEEN):
            found = [row for row in rows if word in row["what"]]
            over.setdefault(word, []).append(
                sum(row["us"] - row["floor us"] for row in found) / above
            )
            slower.setdefault(word, []).extend(
                row["us"] / row["floor us"] for row in found if row["floor us"]
            )
    parts = {word: f"{min(found):.0%} to {max(found):.0%}" for word, found in over.items()}
    assert 2 < min(slower["from codes"]) and max(slower["from codes"]) < 3.1
    low, high = min(slower["dY for"]), max(slower["dY for"])
    return [
        f"is {parts['from codes']} of all that is above the floor on the first four shapes",
        f"takes {low:.1f} to {high:.1f} times its floor, for the same reason: {parts['dY for']}",
        f"guessed wrong take {parts['corrections']} of it, and the time between eleven kernels "
        f"{parts[linear_kernels.BETWEEN]}",
    ]


def of_fp8_in_a_step() -> list[str]:
    rows = {row["name"]: row["ms"] for row in result("fused-step-others")["rows"]}
    return [f"`tetrajet` takes {rows['tetrajet'] / rows['fp8']:.2f} of the time of `fp8`"]


def of_an_mlp() -> list[str]:
    [row] = [
        row for row in result("mlp")["rows"] if (row["hidden"], row["recipe"]) == (4096, "tetrajet")
    ]
    return [f"`tetrajet` takes {row['ms'] / row['floor ms'] - 1:.0%} more than its floor"]


def of_held_elements() -> list[str]:
    _, packed, decoded = result("fused-step-decoded")["rows"]
    return [f"takes {decoded['peak_gib'] - packed['peak_gib']:.1f} GiB"]


def of_a_training_step() -> list[str]:
    rows = [row["gpu_ms"] for row in result("training_step")["rows"]]
    [optimizer] = {f"{spent['optimizer']:.0f}" for spent in rows}
    own = {"gemm", "quantize", "carry", "attention", "optimizer"}
    others = [sum(ms for kind, ms in spent.items() if kind not in own) for spent in rows]
    alike = ([spent[kind] for spent in rows] for kind in ("attention", "optimizer"))
    widest = max(1 - min(times) / max(times) for times in (*alike, others))
    return [
        f"differ by up to {widest:.0%} between the rows",
        f"The optimizer takes {optimizer} ms",
    ]


def of_transformer_engine() -> list[str]:
    fp8, ours = (row["ms"] for row in result("te-delayed")["rows"])
    peaks = [row["peak_gib"] for row in result("te-delayed")["rows"]]
    return [
        f"`te fp8 delayed` takes {fp8:.0f} ms a step, `tetrajet` {ours:.0f}",
        f"its peak is the lower one by some {peaks[0] - peaks[1]:.0f} GiB",
    ]


def of_memory() -> list[str]:
    bf16, _, low = result("fused-step")["rows"]
    same = weights_gradients_and_optimizer()
    beside = [row["peak_gib"] - same for row in (low, bf16)]
    return [
        f"the peak is {low['peak_gib']:.1f} GiB where BF16's is {bf16['peak_gib']:.1f}",
        f"Without the {same:.1f} GiB of weights, gradients and optimizer",
        f"that is {beside[0]:.1f} GiB and {beside[1]:.1f}: {beside[0] / beside[1]:.2f} times "
        f"BF16's memory, at {low['ratio']:.2f} times its speed",
    ]


def of_commits() -> list[str]:
    table, kernels, counted = (
        result(name)["stamp"]["commit"][:7]
        for name in ("linear-te", "quantize_kernels-fused", "counters")
    )
    return [
        f"The table of linears is of commit {table}.",
        f"The quantize kernels were timed alone at commit {kernels}",
        f"the hardware counters of the note are of commit {counted}",
    ]


def of_memory_beside_bf16_with_the_flag() -> list[str]:
    row, times = with_fp8_input()
    [low] = [row for row in result("fused-step")["rows"] if row["name"] == LOW]
    return [
        f"its peak is then {row['peak_gib']:.1f} GiB, at {row['ratio']:.2f} times its speed",
        f"Beside weights, gradients and optimizer the {low['peak_gib']:.1f} GiB of `tetrajet` with "
        f"both flags are {times:.2f} times that",
    ]


def of_memory_in_training() -> list[str]:
    same = weights_gradients_and_optimizer()
    measured, _, low = (row["peak_gib"] - same for row in result("fused-step")["rows"])
    return [
        f"takes {low / measured:.2f} of BF16's memory beside weights, gradients and optimizer, and "
        f"{with_fp8_input()[1]:.2f} of that of BF16 with the first flag"
    ]


def of_graphs() -> list[str]:
    now = steps("parallel_step")
    with_graphs, without = (now["tp4-sp", name]["ms"] for name in (GRAPHS, "tetrajet"))
    return [f"took {with_graphs:.0f} ms a step with graphs and {without:,.0f} ms without"]


IN_PYTORCH = {"four-over-six", "nvfp4-nvidia", "quartet-2", "ue5m3"}


def of_recipes_on_the_host() -> list[str]:
    rows = {row["name"]: row for row in result("host-all")["rows"]}
    assert {*rows} == {"upstream bf16", "bf16", *list_recipes()}
    times = {
        name: max(rows[name][f"times linear_{linear}"] for linear in ("fc1", "fc2"))
        for name in list_recipes()
    }
    emulated = [
        rows[name][f"times linear_{linear}"] for name in IN_PYTORCH for linear in ("fc1", "fc2")
    ]
    fast = {name: each for name, each in times.items() if name not in IN_PYTORCH}
    assert max(fast.values()) < 2
    return [
        f"takes at most {max(fast.values()):.2f} times the time of the faster BF16 linear",
        f"take {min(emulated):.0f} to {max(emulated):.0f} times",
    ]


def of_a_step_beside() -> list[str]:
    bf16, ours = result("fused-step-beside")["rows"]
    return [
        f"BF16 takes {bf16['ms']:.0f} ms and `tetrajet` {ours['ms']:.0f} ms: {ours['ratio']:.2f} "
        "times as fast"
    ]


def of_other_packages() -> list[str]:
    rows = {row["name"]: row.get("found") for row in result("peers")["rows"]}

    def times(name: str, digits: int = 0) -> str:
        """BF16's time as multiples, over the linears."""
        slower = [1 / row["ratio"] for row in rows[name] or ()]
        return f"{min(slower):.{digits}f} to {max(slower):.{digits}f} times"

    [ours], [torchao] = rows["to MXFP4"], rows["torchao to MXFP4, floor"]
    assert round(torchao["us"] / ours["us"]) == 70 and torchao["equal"] == 1
    return [
        f"takes {times('torchao QAT, MXFP4, compiled', 1)} BF16's time when compiled, and "
        f"{times('torchao QAT, MXFP4')} when not",
        f"takes {times('fouroversix, NVFP4')} BF16's time in NVFP4",
        "those of torchao bit for bit, and are made seventy times as fast",
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
    two = steps("parallel-two")
    tensor, pipeline = (
        [f"{two[layout, name]['ms']:.0f}" for name in (GRAPHS, "tetrajet")]
        for layout in ("tp2-sp", "pp2")
    )
    return [
        f"takes {tensor[0]} ms with graphs and {tensor[1]} ms without, and PP2 {pipeline[0]} and "
        f"{pipeline[1]} ms",
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
    [counted] = [
        row for row in result("counters")["rows"] if row["kernel"] == "stochastic, along rows"
    ]
    found, before = shares("quantize_kernels-fused"), shares("quantize_kernels-one-draw")
    both, two = found["stochastic, both"], found["stochastic, both, two draws"]
    copied = both["us"] * both["share"]  # the bytes of this kernel, at the bandwidth of a copy
    carried, below = "stochastic, both, with E5M2", shares("quantize_kernels-below")
    return [
        f"{counted['alu pipe % of peak']:.0f}% of the peak of the units for logic",
        f"{counted['fma heavy pipe % of peak']:.0f}% of the peak of the multipliers",
        f"{counted['issue slots %']:.0f}% of all issue slots",
        f"{counted['dram % of peak']:.0f}% of the peak of memory",
        f"where a copy of as many bytes takes {copied:.0f} µs",
        f"the share rises from {100 * two['share']:.0f} to {both['share']:.0%} of a copy",
        f"tiles below each other take {both['us']:.1f} µs, and tiles beside each other took "
        f"{before['stochastic, both']['us']:.1f} µs",
        f"tiles beside each other take {found[carried]['us']:.1f} µs, and tiles below each other "
        f"took {below[carried]['us']:.1f} µs",
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
    "docs/hopper.md": [
        of_a_linear,
        of_a_linear_s_kernels,
        of_fp8_in_a_step,
        of_an_mlp,
        of_held_elements,
        of_transformer_engine,
        of_a_training_step,
        of_memory,
        of_memory_beside_bf16_with_the_flag,
        of_commits,
        of_a_step_beside,
        of_other_packages,
    ],  # fmt: skip
    "docs/notes/host.md": [of_the_host, of_recipes_on_the_host],
    "docs/notes/quantize-kernels.md": [of_the_quantize_kernels, of_rule_mse],
    "docs/communication.md": [of_bytes],
    "docs/training.md": [of_checkpoints, of_graphs, of_memory_in_training],
}


@pytest.mark.parametrize(
    ("page", "figures"), [(page, each) for page, found in FIGURES.items() for each in found]
)
def test_figures_in_running_text_are_the_committed_result(page: str, figures: Any) -> None:
    says(page, figures())
