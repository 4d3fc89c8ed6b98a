"""Figures in the README are those of the committed results."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.estimate_rows import steps
from benchmarks.study import comparison
from benchmarks.study.gaps import Gap, cell_of
from benchmarks.study.recipe_facts import step_of
from benchmarks.study.tables import epochs
from megatron_fp4 import get_recipe
from megatron_fp4.estimate.layout import stages
from megatron_fp4.estimate.memory import states
from tests.benchmarks.study.prose import rows_of

ROOT = Path(__file__).parents[1]


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def by_name(name: str) -> dict[str, Any]:
    """The rows of a result by the names of their recipes."""
    return {row["name"]: row for row in result(name)["rows"]}


def says(text: str) -> None:
    """Asserts that the README has this text, whatever its line breaks."""
    assert " ".join(text.split()) in " ".join((ROOT / "README.md").read_text().split())


STUDY = (ROOT / "docs/study.md").read_text()


def test_the_earlier_loss_table_is_the_committed_result() -> None:
    assert "\n".join(result("held_out_loss")["table"]) in STUDY


def test_the_model_of_the_earlier_loss_table_and_its_learning_rate() -> None:
    found = result("held_out_loss")
    model, training = found["model"], found["training"]
    tokens = training["batch"] * model["sequence"]
    assert (
        f"LLaMA of {model['layers']} layers of width {model['hidden']}, trained for "
        f"{training['steps']} steps of {tokens:,} tokens on the demo's text, with "
        f"{training['seeds']} seeds"
    ) in STUDY
    chosen, higher = training["learning_rate"], found["bf16_by_learning_rate"]
    lower = result("bf16_learning_rates")["bf16_by_learning_rate"]
    assert min(higher, key=higher.get) == min(lower, key=lower.get) == str(chosen)
    assert str(2 * chosen) in higher and str(chosen / 2) in lower


LOW = "tetrajet --activation-func-fp8-input-store --fp4-weight-cache fprop"
NONE = "tetrajet --activation-func-fp8-input-store --fp4-weight-cache remade"


def weights_gradients_and_optimizer() -> float:
    """GiB of the model of fused-step.json, the same in each row."""
    step = steps(("fused-step",))[0]
    [stage] = stages(step.model, step.layout)
    return sum(states(step.model, step.layout, step.recipe, stage)) / 2**30


def with_fp8_input() -> tuple[dict[str, Any], float]:
    """The row of BF16 with --activation-func-fp8-input-store, and the memory of LOW as a multiple
    of its memory, beside weights, gradients and optimizer."""
    row = by_name("fused-step-others")["bf16 --activation-func-fp8-input-store"]
    same = weights_gradients_and_optimizer()
    ours = by_name("fused-step")[LOW]["peak_gib"]
    return row, (ours - same) / (row["peak_gib"] - same)


def with_no_codes_held() -> tuple[dict[str, Any], float, float]:
    """The row of NONE, and its memory as a multiple of BF16's, and of BF16's with the same flag,
    beside weights, gradients and optimizer."""
    rows, same = by_name("finalists-step"), weights_gradients_and_optimizer()
    ours, (other, _) = rows[NONE], with_fp8_input()
    of_bf16, of_other = ((ours["peak_gib"] - same) / (row["peak_gib"] - same)
                         for row in (rows["bf16"], other))  # fmt: skip
    return ours, of_bf16, of_other


def test_the_training_step() -> None:
    rows = by_name("fused-step")
    low, bf16 = rows[LOW], rows["bf16"]
    says(
        f"is {rows['tetrajet']['ratio']:.2f} times as fast, with a peak memory of "
        f"{rows['tetrajet']['peak_gib']:.1f} GiB (BF16: {bf16['peak_gib']:.1f})"
    )
    same = weights_gradients_and_optimizer()
    says(
        f"the peak of the step of 20 layers is {low['peak_gib']:.1f} GiB, at {low['ratio']:.2f} "
        f"times BF16's speed. Without weights, gradients and optimizer, which take {same:.1f} GiB "
        f"in both, that is {(low['peak_gib'] - same) / (bf16['peak_gib'] - same):.2f} times"
    )
    row, times = with_fp8_input()
    says(f"its peak is then {row['peak_gib']:.1f} GiB")
    says(f"and `tetrajet` takes {times:.2f} times its memory")
    none, _, times = with_no_codes_held()
    says(
        f"makes that {times:.2f} times: a peak of {none['peak_gib']:.1f} GiB, at "
        f"{none['ratio']:.2f} times BF16's speed"
    )
    kinds = ("gemm", "quantize", "carry", "attention", "optimizer")
    other = [
        sum(row["gpu_ms"].values()) - sum(row["gpu_ms"].get(kind, 0) for kind in kinds)
        for row in (rows["tetrajet"], bf16)
    ]
    says(f"take {other[0]:.0f} ms of the step of 20 layers, and {other[1]:.0f} ms in BF16")
    names = [*("mxfp4", "tetrajet-ema", "tetrajet-ramping", "mxfp4-rht-sr", "nvfp4-nvidia")]
    names += [*("four-over-six", "dge-occ", "ue5m3", "quartet-2")]
    others = [f"`{name}` {by_name('recipes-step')[name]['ratio']:.2f}" for name in names]
    layers = result("recipes-step")["layers"]
    says(f"The other recipes, in the step of {layers} layers on one GPU ([recipes-step.json]")
    says(f"{', '.join(others[:-1])} and {others[-1]}.")


def test_transformer_engine_s_fp8() -> None:
    rows = by_name("te-delayed")
    fp8, ours = rows["te fp8 delayed"], rows["tetrajet"]
    says(
        f"| {ours['ms']:.0f} ms, {ours['peak_gib']:.1f} GiB | {fp8['ms']:.0f} ms, "
        f"{fp8['peak_gib']:.1f} GiB | [te-delayed.json]"
    )
    of_all = by_name("te-step")
    times = {name: row["ms"] for name, row in of_all.items() if name.startswith("te fp8")}
    assert min(times, key=lambda name: times[name]) == "te fp8 delayed"


def test_transformer_engine_s_fp8_on_two_gpus() -> None:
    results = result("parallel-te"), result("parallel-fp8")
    found = {(row["layout"], row["name"]): row for each in results for row in each["rows"]}
    fp8, ours = (
        [found[at, name] for at in ("tp2-sp", "pp2")] for name in ("te fp8 delayed", "tetrajet")
    )
    layers = results[0]["layers"]
    (te_tp, te_pp), (tp, pp) = ([f"{row['ms']:.0f} ms" for row in rows] for rows in (fp8, ours))
    says(f"| a step of {layers} layers, two GPUs, TP2 with SP | {tp} | {te_tp} |")
    says(f"| the same, PP2 | {pp} | {te_pp}, no more than the spread of runs |")
    te_sent, sent = (f"{row['sent']['all-gather'] / 1e9:.1f} GB" for row in (fp8[0], ours[0]))
    says(f"in the step of {layers} layers, TP2 with SP | {sent} | {te_sent} |")


def test_transformer_engine_s_fp8_on_four_gpus() -> None:
    te, ours = (
        [f"{row['ms']:.0f} ms" for row in result(f"parallel-four-{name}")["rows"]]
        for name in ("te", "beside")
    )
    layers = result("parallel-four-te")["layers"]
    says(f"| a step of {layers} layers, four GPUs, TP4 with SP | {ours[0]} | {te[0]}, with a slow ")
    says(f"| the same, TP2 with SP and PP2 | {ours[1]} | {te[1]} |")


def test_the_host_s_time() -> None:
    times = [
        row[f"times linear_{linear}"]
        for name in ("host", "host-recorded", "host-all", "host-ten")
        for row in result(name)["rows"]
        if row["name"] == "tetrajet"
        for linear in ("fc1", "fc2")
    ]
    says(f"takes the host {min(times):.2f} to {max(times):.2f} times BF16's time")


def test_the_table_of_training_steps() -> None:
    def ratios(name: str) -> dict[tuple[str, str], str]:
        rows = result(name)["rows"]
        return {(row["layout"], row["name"]): f"{row['ratio']:.2f}" for row in rows}

    layers, two = result("parallel-two")["layers"], ratios("parallel-two")
    alone = result("fused-step")["layers"], by_name("fused-step")["tetrajet"]["ratio"]
    says(
        f"| {alone[0]} | 1 | | {alone[1]:.2f} |"
        f" | {layers} | 1 | | {two['one', 'tetrajet']} |"
        f" | {layers} | 2 | data | {two['dp2', 'tetrajet']} |"
        f" | {layers} | 2 | tensor and sequence | {two['tp2-sp', 'tetrajet']} |"
        f" | {layers} | 2 | pipeline | {two['pp2', 'tetrajet']} |"
    )
    graphs, four = "tetrajet --cuda-graph-impl local", ratios("parallel-four")
    assert result("parallel-four")["layers"] == layers
    says(
        f"| {layers} | 4 | tensor and sequence | {four['tp4-sp', 'tetrajet']} |"
        f" | {layers} | 4 | tensor and sequence, with CUDA graphs | {four['tp4-sp', graphs]} |"
        f" | {layers} | 4 | tensor and sequence (2), pipeline (2) |"
        f" {four['tp2-sp-pp2', 'tetrajet']} |"
    )
    for layout in ("tp2-sp", "pp2"):
        assert two[layout, graphs] <= two[layout, "tetrajet"]
    ms = {row["name"]: row["ms"] for row in result("parallel-four")["rows"] if row["gpus"] == 4
          and row["layout"] == "tp4-sp"}  # fmt: skip
    says(f"a step of `tetrajet` from {ms['tetrajet']:.0f} to {ms[graphs]:.0f} ms")


def test_a_linear() -> None:
    fast = of_linears("ratio")["tetrajet"]
    low, high = min(fast), max(fast)
    formats = of_linears("ratio", "linear-formats")
    least, most = min(formats["dge-occ"]), max(formats["dge-occ"])
    says(f"a linear, forward and backward, is {low:.2f} to {high:.2f} times as fast")
    says(f"A linear of `dge-occ` is {least:.2f} to {most:.2f} times as fast as in BF16")
    says(f"`dge-occ` takes {1 / most:.1f} to {1 / least:.1f} times BF16's time for a linear")


def test_the_bytes() -> None:
    def ratios(table: str) -> list[str]:
        """Of tetrajet's cells to BF16's, which a cell leaves out if it is 1."""
        [line] = [line for line in result("bytes")["table"][table] if "| tetrajet |" in line]
        return [(re.findall(r"\((.*)\)", cell) or ["1"])[0] for cell in line.split("|")[2:-1]]

    scattered, whole = ratios("a step")
    says(f"(4.25 bits an element, not 16) | {ratios('saved X')[0]} |")
    says(f"two ranks with tensor and sequence parallelism | {scattered} |")
    says(f"two ranks with tensor parallelism alone | {whole} |")
    says(f"(`--fp4-weight-cache off` keeps none) | {ratios('weights')[3]} of the weights in BF16 |")


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-newest.txt"])
def test_the_versions_are_those_that_are_installed(file: str) -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / file).read_text(), re.M))
    versions = [pins[name] for name in ("torch", "triton", "megatron-core")]
    assert f"| `{file}` | {' | '.join(versions)} |" in (ROOT / "README.md").read_text()


def test_the_step_beside_fused_fp8() -> None:
    fused = [result(f"te-fused-{n}")["rows"][0]["ms"] for n in (1, 2)]
    fused += [row["ms"] for row in result("te-turns")["rows"]]
    files = ("te-fused-beside", "te-turns-beside")
    ours = [row["ms"] for name in files for row in result(name)["rows"]]
    says(
        f"beside its fused operations, in turns | {min(ours):.0f} to {max(ours):.0f} ms | "
        f"{min(fused):.0f} to {max(fused):.0f} ms |"
    )
    assert abs(statistics.mean(ours) / statistics.mean(fused) - 1) < 0.005  # "about the same time"


def test_the_loss_beside_fp8() -> None:
    found = comparison.read()

    def above(name: str, seeds: int) -> Gap:
        gap = found.gap(name)
        assert gap is not None and len(gap.by_seed) == seeds
        return gap

    ours, fp8, own = above("tetrajet", 5), above("fp8", 5), above("tetrajet-fp8", 5)
    least, most = above("quartet-2", 2), above("nvfp4-nvidia", 2)
    assert least.mean < above("four-over-six", 5).mean < most.mean
    ends = {row["configuration"]["recipe"]: row["evaluated"] for row in rows_of("served")}
    in_fp8 = {name: each["fp8"] - ends["bf16"]["bf16"] for name, each in ends.items()}
    for cell in found.cells:
        read = epochs(next(row for row in found.rows if cell_of(row) == cell))
        assert (round(read) == 4) == (cell.size in ("60M", "150M"))
    step = step_of("tetrajet-fp8", get_recipe("tetrajet-fp8"))
    assert step is not None
    plain, rht = above("mxfp4", 2).mean, above("mxfp4-rht-sr", 2).mean
    assert fp8.verdict == "within the spread"
    speeds = {name: row["ratio"] for name, row in by_name("recipes-step").items()}
    times = {name: f"{speed:.2f} times BF16's speed" for name, speed in speeds.items()}
    others = ("ue5m3", "nvfp4-nvidia", "four-over-six", "quartet-2")
    slow = [speeds[name] for name in others]
    says(
        f"ends {own.mean:.3f} above BF16's loss, where `tetrajet` ends {ours.mean:.3f} above it "
        f"(five seeds each) and NVFP4 recipes {least.mean:.3f} to {most.mean:.3f} (two to five "
        "seeds). Each is evaluated as it trains at the end: this recipe in FP8, the others in FP4. "
        f"With both models evaluated in FP8, `tetrajet-fp8` is {in_fp8['tetrajet-fp8']:.3f} above "
        f"and `tetrajet` {in_fp8['tetrajet']:.3f} (one seed). Larger models read their text four "
        "times, which [can make gaps look small](docs/recipes.md#text-that-is-read-more-than-once)."
        f" A step has {step.ratio:.2f} times BF16's speed, as a mean over its two phases, each "
    )
    says(f"{times['tetrajet']}; {ours.mean:.3f} above BF16's loss (five seeds)")
    says(f"as fast ({speeds['mxfp4']:.2f} times); its loss is {plain:.3f} above BF16's (two seeds)")
    assert speeds["mxfp4"] == pytest.approx(speeds["tetrajet"], abs=0.01)  # "as fast"
    says(f"`fp8`: {times['fp8']}, {fp8.mean:.3f} above BF16's loss (five seeds, ")
    says(f"| {rht:.3f} above BF16's loss (two seeds); {times['mxfp4-rht-sr']}")
    says(
        f"a step of `dge-occ` has {times['dge-occ']}, of the others "
        f"{min(slow):.2f} to {max(slow):.2f} times"
    )
    says(
        "200M tokens, five seeds, each evaluated in the precision of its training | "
        f"{ours.mean:.3f} | {fp8.mean:.3f} with this package's `fp8`;"
    )


def of_linears(field: str, name: str = "linear-te") -> dict[str, list[float]]:
    """A field of the rows of a result of benchmarks/linear.py for each linear, by recipe."""
    found: dict[str, list[float]] = {}
    for row in result(name)["rows"]:
        found.setdefault(row["recipe"], []).append(row[field])
    return found


def of_delayed_fp8_s_time() -> list[float]:
    """The time of tetrajet's linears as a multiple of Transformer Engine's with delayed scaling."""
    times = of_linears("ms")
    return [a / b for a, b in zip(times["tetrajet"], times["te fp8 delayed"], strict=True)]


def test_linears_beside_transformer_engine_s_and_other_packages() -> None:
    longer = of_delayed_fp8_s_time()
    says(f"forward and backward | {min(longer):.2f} to {max(longer):.2f} times as long | 1 |")
    peers = {row["name"]: row for row in result("peers")["rows"]}
    for name, line in {
        "torchao QAT, MXFP4, compiled": "| torchao {}, MXFP4 of X and W for QAT, compiled | {} |",
        "fouroversix, NVFP4": "| fouroversix {}, NVFP4 | {} |",
    }.items():
        speeds = [each["ratio"] for each in peers[name]["found"]]
        speed = f"{min(speeds):.2f} to {max(speeds):.2f} times BF16's speed"
        says(line.format(peers[name]["version"], speed))
    assert "requires SM100" in str(peers["torchao training, NVFP4"])


def test_mxfp4_sends_as_many_bytes_as_tetrajet() -> None:
    lines = result("bytes")["table"]["a step"]
    cells = {name: line.split("|")[2] for line in lines for name in [line.split("|")[1].strip()]}
    assert cells["mxfp4"] == cells["tetrajet"] != cells["bf16"]


def test_the_summary_of_the_hopper_page() -> None:
    ratios, of_te = of_linears("ratio")["tetrajet"], [1 / each for each in of_delayed_fp8_s_time()]
    rows = {
        (file, row.get("layout"), row["name"]): row
        for file in ("fused-step", "te-delayed", "parallel-two", "parallel-fp8", "parallel-te")
        + ("parallel-four", "parallel-four-te", "parallel-four-beside")
        for row in result(file)["rows"]
    }

    def faster(layout: str | None, te: str, own: str) -> str:
        ours, theirs = rows[own, layout, "tetrajet"], rows[te, layout, "te fp8 delayed"]
        return f"{theirs['ms'] / ours['ms']:.2f}"

    graphs, four = "tetrajet --cuda-graph-impl local", ("parallel-four-te", "parallel-four-beside")
    lines = [
        f"forward and backward | {min(ratios):.2f} to {max(ratios):.2f} | {min(of_te):.2f} to "
        f"{max(of_te):.2f} |",
        f"one GPU | {rows['fused-step', None, 'tetrajet']['ratio']:.2f} | "
        f"{faster(None, 'te-delayed', 'te-delayed')} |",
        f"TP2 with SP | {rows['parallel-two', 'tp2-sp', 'tetrajet']['ratio']:.2f} | "
        f"{faster('tp2-sp', 'parallel-te', 'parallel-fp8')} |",
        f"PP2 | {rows['parallel-two', 'pp2', 'tetrajet']['ratio']:.2f} | "
        f"{faster('pp2', 'parallel-te', 'parallel-fp8')}, within",
        f"TP4 with SP | {rows['parallel-four', 'tp4-sp', 'tetrajet']['ratio']:.2f} | "
        f"[{faster('tp4-sp', *four)}]",
        f"CUDA graphs | {rows['parallel-four', 'tp4-sp', graphs]['ratio']:.2f} | not measured |",
        f"TP2 with SP and PP2 | {rows['parallel-four', 'tp2-sp-pp2', 'tetrajet']['ratio']:.2f} | "
        f"[{faster('tp2-sp-pp2', *four)}]",
    ]
    page = (ROOT / "docs/hopper.md").read_text()
    assert [line for line in lines if line not in page] == []
