"""Figures of steps on several GPUs in running text of docs/ are the committed results."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from benchmarks import parallel_step
from benchmarks.training_step_worker import KINDS
from megatron_fp4.arithmetic.moments import Moments
from tests.test_notes import GRAPHS, result, says, steps

Row = dict[str, Any]
FP8, STATE = "te fp8 delayed", "tetrajet --fp4-optimizer-state m=fp8,v=fp16"
AWARE = "tetrajet --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"
# Kinds of kernels that have no column in the tables, other than attention and the optimizer.
WITHOUT_A_COLUMN = {*KINDS, "other"} - {*parallel_step.KINDS, "attention", "optimizer"}


def spent(row: Row, kinds: Collection[str]) -> float:
    """Milliseconds of the profiled step in kernels of these kinds."""
    return sum(row["gpu_ms"].get(kind, 0.0) for kind in kinds)


def less(one: Row, other: Row) -> float:
    """The GiB by which the peak of one row is lower than that of another."""
    return other["peak_gib"] - one["peak_gib"]


def of_several_gpus() -> list[str]:
    found = steps("parallel-two")
    ours, bf16 = found["tp2-sp", "tetrajet"], found["tp2-sp", "bf16"]
    made = sum(ours["gpu_ms"][kind] for kind in ("gemm", "quantize", "carry"))
    sent = [f"{sum(row['sent'].values()) / 1e9:.1f} GB" for row in (ours, bf16)]
    speeds = {at: f"{found[at]['ratio']:.2f}" for at in found}
    for layout in ("tp2-sp", "pp2"):
        assert found[layout, GRAPHS]["peak_gib"] < found[layout, "tetrajet"]["peak_gib"]
    assert found["pp2", "upstream bf16"]["ratio"] == pytest.approx(
        found["pp2", "upstream bf16, graphs"]["ratio"], abs=0.005
    )
    later = steps("parallel-two-graphs")
    ratios = [f"{later[layout, 'tetrajet']['ratio']:.2f}" for layout in ("tp2-sp", "pp2")]
    [gained] = {
        f"{later[layout, 'bf16']['ms'] / later[layout, 'bf16, graphs']['ms'] - 1:.0%}"
        for layout in ("tp2-sp", "pp2")
    }
    more = less(later["pp2", "bf16"], later["pp2", "bf16, graphs"])
    return [
        f"This package's gains {gained}, measured later",
        f"`tetrajet` is {ratios[0]} times as fast as BF16 with graphs under TP2 with SP, and "
        f"{ratios[1]} times under PP2",
        f"That of PP2 is {more:.0f} GiB higher",
        f"`tetrajet` is {speeds['tp2-sp', 'tetrajet']} times as fast as BF16 under TP2 with SP",
        f"A rank sends {sent[0]} where BF16's sends {sent[1]}, and its GEMMs with their "
        f"operands take {made:.0f} ms where BF16's take {bf16['gpu_ms']['gemm']:.0f} ms",
        f"with them `tetrajet` is {speeds['tp2-sp', GRAPHS]} times as fast",
        f"is {speeds['pp2', 'tetrajet']} times as fast as BF16 under PP2, and "
        f"{speeds['pp2', GRAPHS]} times with CUDA graphs",
    ]


def of_four_gpus() -> list[str]:
    found = steps("parallel-four")
    tensor, both = (
        {name: row for (at, name), row in found.items() if at == layout}
        for layout in ("tp4-sp", "tp2-sp-pp2")
    )
    bf16, ours, captured = (tensor[name] for name in ("bf16", "tetrajet", GRAPHS))
    plain = [f"{tensor[name]['ms']:.0f}" for name in ("upstream bf16", "upstream bf16, graphs")]
    made = spent(captured, ("gemm", "quantize", "carry"))
    sent = [f"{sum(row['sent'].values()) / 1e9:.1f} GB" for row in (ours, bf16)]
    fp8 = [tensor[f"fp8{graphs}"]["ratio"] for graphs in ("", " --cuda-graph-impl local")]
    again = {name: row for (_, name), row in steps("parallel-four-upstream").items()}
    assert again["upstream bf16, graphs"]["ratio"] == 1
    [data] = [row for (_, name), row in steps("few-bits-four").items() if name == "tetrajet"]
    return [
        f"Under TP4 with SP `tetrajet` is {ours['ratio']:.2f} times as fast as BF16, and "
        f"{captured['ratio']:.2f} times with CUDA graphs",
        f"{ours['exposed_ms']:.0f} ms of the collectives are exposed without graphs, and "
        f"{captured['exposed_ms']:.0f} ms with them",
        f"With graphs the GEMMs and their operands take {made:.0f} ms, where BF16's take "
        f"{bf16['gpu_ms']['gemm']:.0f} ms, and a rank sends {sent[0]}, where BF16's sends "
        f"{sent[1]}",
        f"({plain[0]} and {plain[1]} ms)",
        f"{fp8[0]:.2f} times as fast as BF16 without them, and {fp8[1]:.2f} times with them",
        f"Under TP2 with SP and PP2 `tetrajet` is {both['tetrajet']['ratio']:.2f} times as fast as "
        f"BF16, and {both[GRAPHS]['ratio']:.2f} times with CUDA graphs",
        f"`tetrajet` is {data['ratio']:.2f} times as fast as BF16. [notes/host.md]",
        f"`tetrajet` is {again['tetrajet']['ratio']:.2f} times as fast without graphs, and "
        f"{again[GRAPHS]['ratio']:.2f} times with them",
    ]


def of_two_gpus_beside_fp8() -> list[str]:
    found, before = steps("parallel-fp8") | steps("parallel-te"), steps("parallel-two")
    rows = {at: [found[at, name] for name in ("tetrajet", FP8, "fp8")] for at in ("tp2-sp", "pp2")}
    share = {at: [f"{of[0]['ms'] / each['ms']:.2f}" for each in of[1:]] for at, of in rows.items()}
    tensor, pipeline = rows.values()
    made = [f"{spent(row, ('gemm', 'quantize', 'carry')):.0f} ms" for row in tensor]
    gathered = [f"{row['sent']['all-gather'] / 1e9:.1f} GB" for row in tensor]
    exposed = [f"{row['exposed_ms']:.0f}" for row in tensor]
    again = before["pp2", "tetrajet"]["ms"]
    assert 0.75 < (again - pipeline[0]["ms"]) / (pipeline[1]["ms"] - pipeline[0]["ms"]) < 1
    return [
        f"takes {share['tp2-sp'][0]} of its time under TP2 with SP, and {share['pp2'][0]} under "
        "PP2",
        *(
            f"`tetrajet` takes {of[0]} of the time of `te fp8 delayed`, and {of[1]} of that of "
            "`fp8`"
            for of in share.values()
        ),
        f"Its GEMMs with their operands take {made[0]}: longer than those of `te fp8 delayed`, "
        f"{made[1]}, but not than those of `fp8`, {made[2]}",
        f"A rank gathers {gathered[0]}, where it gathers {gathered[1]} with `te fp8 delayed` and "
        f"{gathered[2]} with `fp8`. {exposed[0]} ms of communication are exposed, in place of "
        f"{exposed[1]} and {exposed[2]}",
        f"it took {again:.0f} ms in the table",
        "is {:.1f} and {:.1f} GiB lower than that of `te fp8 delayed`, and {:.1f} and {:.1f} GiB "
        "lower than that of `fp8`".format(
            *(less(of[0], of[other]) for other in (1, 2) for of in rows.values())
        ),
    ]


def of_other_fp8_recipes() -> list[str]:
    others, own = steps("parallel-te-others"), steps("parallel-te-beside")["pp2", "tetrajet"]
    tensorwise, blockwise = (others["pp2", f"te fp8 {how}"] for how in ("tensorwise", "blockwise"))
    return [
        f"Under PP2 `tetrajet` takes {own['ms'] / tensorwise['ms']:.2f} of the time of "
        f"`te fp8 tensorwise`, and {own['ms'] / blockwise['ms']:.2f} of that of `te fp8 blockwise`."
    ]


def of_four_gpus_beside_fp8() -> list[str]:
    te, ours = (
        {row["layout"]: row for row in result(f"parallel-four-{name}")["rows"]}
        for name in ("te", "beside")
    )
    times = {at: f"{ours[at]['ms'] / row['ms']:.2f}" for at, row in te.items()}
    gathered = [f"{each['tp4-sp']['sent']['all-gather'] / 1e9:.1f} GB" for each in (ours, te)]
    assert all(row["exposed_ms"] > row["ms"] / 4 for each in (te, ours) for row in each.values())
    return [
        f"`tetrajet` takes {times['tp4-sp']} of its time under TP4 with SP, and "
        f"{times['tp2-sp-pp2']} under TP2 with SP and PP2",
        f"A rank gathers {gathered[0]} in place of {gathered[1]} under TP4",
    ]


def of_a_fused_loss() -> list[str]:
    first, second = (f"{row['ms']:.0f}" for row in result("te-delayed-loss")["rows"])
    return [f"with it `te fp8 delayed` takes {first} and {second} ms in two launches"]


def of_few_bits() -> list[str]:
    one, two, four = (steps(f"few-bits-{gpus}") for gpus in ("one", "two", "four"))
    lower = [
        less(found[at, STATE], found[at, "tetrajet"]) for found, at in ((one, "one"), (two, "dp2"))
    ]
    plain, fp8 = two["dp2", "tetrajet"], two["dp2", "tetrajet --fp4-grad-comm fp8"]
    [together] = [row for (_, name), row in two.items() if len(name.split()) > 4]
    sent, few = plain["sent"], together["sent"]
    totals = [f"{sum(each.values()) / 1e9:.1f} GB" for each in (few, sent)]
    base = {"one": one["one", "tetrajet"], "dp2": plain, "dp4": four["dp4", "tetrajet"]}
    ours = [row for of in (one, two, four) for row in of.values() if row["name"] != "bf16"]
    times = [row["ms"] / base[row["layout"]]["ms"] for row in ours]
    in_bf16 = times_with_gradients()[1::2]
    [over_four] = [row for (_, name), row in four.items() if len(name.split()) > 4]
    of_four = [f"{sum(row['sent'].values()) / 1e9:.1f} GB" for row in (over_four, base["dp4"])]
    assert fp8["gpu_ms"].keys() >= {"gradients"}
    return [
        f"takes {lower[0]:.1f} GiB less on one GPU, and {lower[1]:.1f} GiB less on each of two",
        f"take {fp8['peak_gib'] - plain['peak_gib']:.1f} GiB",
        f"On each of four GPUs all flags together take {less(over_four, base['dp4']):.1f} GiB less",
        f"On four GPUs it is {of_four[0]} in place of {of_four[1]}",
        f"{few['all-to-all'] / 1e6:,.0f} MB of gradients in place of "
        f"{sent['reduce-scatter'] / 1e6:,.0f} MB, and {few['all-gather'] / 1e6:,.0f} MB of weights "
        f"in place of {sent['all-gather'] / 1e6:,.0f} MB: with all flags {totals[0]} in place of "
        f"{totals[1]}",
        f"With gradients in FP8, and with the other flags, a step takes {min(times):.2f} to "
        f"{max(times):.2f} times as long as without the flags, on one, two and four GPUs. With "
        f"gradients in BF16 it takes {in_bf16[0]:.2f} and {in_bf16[1]:.2f} times as long",
        f"sum gradients take {fp8['gpu_ms']['gradients']:.0f} ms of a GPU's step; the all-to-alls "
        f"and all-gathers take {fp8['gpu_ms']['communication']:.0f} ms, of which "
        f"{fp8['exposed_ms']:.0f} ms are not hidden",
    ]


def of_profiled_steps() -> list[str]:
    runs = [steps(f"few-bits-{name}") for name in ("two", "bf16", "two-bf16", "aware")]
    plain = [found["dp2", "tetrajet"] for found in runs]
    low = [found["dp2", STATE] for found in (runs[0], runs[3])]
    assert all(row["sent"] == plain[0]["sent"] for row in (*plain, *low))
    fp8 = runs[0]["dp2", "tetrajet --fp4-grad-comm fp8"]
    [together] = [row for (_, name), row in runs[0].items() if len(name.split()) > 4]
    took, exposed = (
        [f"{value(row):.0f}" for row in (*plain, *low)]
        for value in (lambda row: spent(row, ("communication",)), lambda row: row["exposed_ms"])
    )
    others = [row["exposed_ms"] for row in (*plain[1:], *low)]
    assert plain[0]["exposed_ms"] > 2 * max(others)
    fewer = [each - fp8["exposed_ms"] for each in others]
    assert fp8["ms"] > plain[0]["ms"]
    return [
        f"took {', '.join(took[:3])} and {took[3]} ms in the profiled steps of four launches on "
        f"two GPUs, of which {', '.join(exposed[:3])} and {exposed[3]} ms were exposed",
        f"it was {took[4]} and {took[5]} ms, of which {exposed[4]} and {exposed[5]} ms were "
        "exposed",
        f"With `--fp4-grad-comm fp8` {fp8['exposed_ms']:.0f} ms were exposed, {min(fewer):.0f} to "
        f"{max(fewer):.0f} ms less than in the other five steps, and the kernels that encode and "
        f"sum gradients take {fp8['gpu_ms']['gradients']:.0f} ms",
        f"With all flags, which send less still, {together['exposed_ms']:.0f} ms were exposed",
    ]


def of_gradients_in_bf16() -> list[str]:
    found = steps("few-bits-bf16")
    plain, bf16 = found["dp2", "tetrajet"], found["dp2", "tetrajet --fp4-grad-comm bf16"]
    fp8 = steps("few-bits-two")["dp2", "tetrajet --fp4-grad-comm fp8"]
    [whole, half, quarter] = (
        sum(size for kind, size in row["sent"].items() if kind in ("reduce-scatter", "all-to-all"))
        for row in (plain, bf16, fp8)
    )
    return [
        f"A rank sends {half / 1e6:,.0f} MB of gradients in place of {whole / 1e6:,.0f} MB: "
        f"{half / whole:.2f} of float32's. FP8's are {quarter / whole:.2f}.",
        f"A step takes {bf16['ms'] / plain['ms']:.2f} times as long as without the flag. The "
        f"kernels that encode and sum gradients take {bf16['gpu_ms']['gradients']:.0f} ms of a "
        f"GPU's step. {bf16['exposed_ms']:.0f} ms of communication are exposed in the profiled "
        f"step, and {plain['exposed_ms']:.0f} ms without the flag",
    ]


def of_gradients_beside_upstream_s() -> list[str]:
    names = ("tetrajet", "tetrajet --fp4-grad-comm bf16", "tetrajet --grad-reduce-in-bf16")
    found = steps("few-bits-four-bf16")
    plain, ours, upstream = (found["dp4", name] for name in names)
    sent = [
        row["sent"].get("all-to-all", 0) + row["sent"].get("reduce-scatter", 0)
        for row in (plain, ours, upstream)
    ]
    assert sent[1] == sent[2] == sent[0] / 2
    two = steps("few-bits-two-bf16")
    before, after = (two["dp2", names[0]], two["dp2", names[2]])
    [less] = {
        f"{a['peak_gib'] - b['peak_gib']:.1f}" for a, b in ((plain, upstream), (before, after))
    }
    return [
        f"four GPUs a step takes {ours['ms'] / plain['ms']:.2f} times as long with "
        f"`--fp4-grad-comm bf16`, and {upstream['ms'] / plain['ms']:.2f} times with "
        "`--grad-reduce-in-bf16`",
        f"on two GPUs the latter takes {after['ms'] / before['ms']:.2f} times as long",
        f"`--grad-reduce-in-bf16` takes {less} GiB less on two GPUs and on four",
    ]


def of_plain_data_parallelism() -> list[str]:
    found = steps("few-bits-ddp")
    plain, fp8 = found["dp2-ddp", "tetrajet"], found["dp2-ddp", "tetrajet --fp4-grad-comm fp8"]
    whole, few = sum(plain["sent"].values()), sum(fp8["sent"].values())
    [exposed] = {f"{row['exposed_ms']:.0f}" for row in (plain, fp8)}
    return [
        f"A rank sends {few / 1e6:,.0f} MB in place of {whole / 1e6:,.0f} MB: "
        f"{few / whole:.2f} of float32's.",
        f"A step takes {fp8['ms'] / plain['ms']:.2f} times as long as without the flag. {exposed} "
        "ms of communication are exposed in both.",
    ]


def of_the_precision_aware_optimizer() -> list[str]:
    found = steps("few-bits-aware")
    plain, aware, state = (found["dp2", name] for name in ("tetrajet", AWARE, STATE))
    [(converted, parts)] = [(ms, n) for ms, n, name in aware["largest"] if "cast_transpose" in name]
    [(updated, own)] = [(ms, n) for ms, n, name in state["largest"] if name == "adamw_kernel"]
    assert own == parts and not any(
        "cast_transpose" in str(row["largest"]) for row in (plain, state)
    )
    around = [spent(row, ("optimizer", "other")) for row in (aware, plain)]
    updates = plain["sent"]["all-gather"] / 2  # parameters of a rank, which sends them in 2 bytes
    # Moments and main weight; upstream's first moment is there twice, and half of the main weight.
    bytes_less = Moments.read("m=fp8,v=fp16").bytes + 4 - (2 * 1 + 2 + 2)
    assert less(aware, state) == pytest.approx(updates * bytes_less / 2**30, abs=0.02)
    longer = aware["ms"] - plain["ms"]
    return [
        f"it takes {less(aware, plain):.1f} GiB less than `tetrajet`, and `--fp4-optimizer-state` "
        f"{less(state, plain):.1f} GiB less",
        f"this is the {less(aware, state):.1f} GiB of difference",
        f"A step takes {longer:.0f} ms longer than without it, {aware['ms'] / plain['ms']:.2f} "
        f"times; with `--fp4-optimizer-state` it takes {state['ms'] / plain['ms']:.2f} times",
        f"{converted:.0f} of these ms are one kernel of Transformer Engine, `cast_transpose`",
        f"once for each of a rank's {parts} parts of parameters",
        f"they take {around[0] - around[1]:.0f} ms more than in the first row",
        f"in one kernel, which takes {updated:.0f} ms",
    ]


def times_with_gradients() -> list[float]:
    """How many times as long a step takes: in FP8 and in BF16 on two GPUs, then on four."""
    runs = [("dp2", "two", "fp8"), ("dp2", "bf16", "bf16")]
    runs += [("dp4", "four", "fp8"), ("dp4", "four-bf16", "bf16")]
    found = [(at, steps(f"few-bits-{name}"), form) for at, name, form in runs]
    return [
        rows[at, f"tetrajet --fp4-grad-comm {form}"]["ms"] / rows[at, "tetrajet"]["ms"]
        for at, rows, form in found
    ]


def of_few_bits_in_training() -> list[str]:
    times = times_with_gradients()
    aware = steps("few-bits-aware")
    upstream, own = aware["dp2", AWARE], aware["dp2", STATE]
    whole = steps("few-bits-ddp")
    assert {name for _, name in whole} == {"tetrajet", "tetrajet --fp4-grad-comm fp8"}
    slower = whole["dp2-ddp", "tetrajet --fp4-grad-comm fp8"]["ms"]
    return [
        "With the distributed optimizer a step on two H200s of one host "
        f"takes {times[0]:.2f} times as long with `fp8` as without it, and {times[1]:.2f} times "
        f"with `bf16`; on four it takes {times[2]:.2f} and {times[3]:.2f} times as long. "
        "With plain data parallelism on two it takes "
        f"{slower / whole['dp2-ddp', 'tetrajet']['ms']:.2f} times as long with `fp8`",
        f"takes {less(upstream, own):.1f} GiB less than this flag, and a step "
        f"{upstream['ms']:,.0f} ms in place of {own['ms']:,.0f} ms",
    ]


def of_the_memory_of_moments() -> list[str]:
    one = steps("few-bits-one")
    lower = less(one["one", STATE], one["one", "tetrajet"])
    return [f"takes {lower:.1f} GiB less on one H200"]


FIGURES: dict[str, list[Any]] = {
    "docs/hopper.md": [
        of_several_gpus,
        of_four_gpus,
        of_two_gpus_beside_fp8,
        of_other_fp8_recipes,
        of_four_gpus_beside_fp8,
        of_a_fused_loss,
    ],
    "docs/communication.md": [
        of_few_bits,
        of_profiled_steps,
        of_gradients_in_bf16,
        of_gradients_beside_upstream_s,
        of_plain_data_parallelism,
        of_the_precision_aware_optimizer,
    ],
    "docs/training.md": [of_few_bits_in_training, of_the_memory_of_moments],
}


@pytest.mark.parametrize(
    ("page", "figures"), [(page, each) for page, found in FIGURES.items() for each in found]
)
def test_figures_of_several_gpus_are_the_committed_result(page: str, figures: Any) -> None:
    says(page, figures())
