"""Figures of docs/hopper.md in running text, of one GPU, are the committed results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import kernel_instructions, linear, linear_kernels, mlp
from megatron_fp4 import get_recipe
from tests.test_notes import result, says
from tests.test_readme import (
    LOW,
    weights_gradients_and_optimizer,
    with_fp8_input,
    with_no_codes_held,
)


def of_a_linear() -> list[str]:
    rows = {(row["in"], row["out"], row["recipe"]): row for row in result("linear-te")["rows"]}
    ours = {key[:2]: row for key, row in rows.items() if key[2] == "tetrajet"}
    more = [f"{ours[at]['ms'] / ours[at]['floor ms'] - 1:.0%} more" for at in ours]
    bf16 = {at: min(rows[(*at, name)]["ms"] for name in ("bf16", "te bf16")) for at in ours}
    gemms = [bf16[at] / row["products ms"] for at, row in ours.items()]
    beside = {
        name: [row["ms"] / rows[(*at, name)]["ms"] for at, row in ours.items()]
        for name in ("fp8", "te fp8 delayed")
    }
    low, high = (
        {name: f"{pick(found):.2f}" for name, found in beside.items()} for pick in (min, max)
    )
    later = [
        f"{row['ms'] / row['floor ms'] - 1:.0%}"
        for row in result("linear-formats")["rows"]
        if row["recipe"] == "tetrajet"
    ]
    return [
        f"these are {', '.join(later[:-1])} and {later[-1]}. The kernels",
        f"it takes {more[0]} than its lower bound at 4096 × 4096, {more[1]} at 4096 × 14336, "
        f"{more[2]} at 14336 × 4096, {more[3]} at 8192 × 8192, {more[4]} at 5120 × 13824 and "
        f"{more[5]} at 2048 × 5632",
        f"The FP8 GEMMs are {min(gemms):.1f} to {max(gemms):.1f} times as fast as BF16's",
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
        f"is {parts['from codes']} of all that is above the lower bound on the first four shapes",
        f"takes {low:.1f} to {high:.1f} times its lower bound, with",
        f"bytes at 8192 × 8192: {parts['dY for']}",
        f"guessed wrong take {parts['corrections']} of it, and the time between eleven kernels "
        f"{parts[linear_kernels.BETWEEN]}",
    ]


def of_instructions() -> list[str]:
    counted = {row["kernel"]: row for row in result("kernel_instructions")["rows"]}
    codes, dy = counted[kernel_instructions.FROM_CODES], counted["stochastic, both, with E5M2"]
    gradient = counted["stochastic, both, of a SwiGLU's gradient, with E5M2"]
    square = {r["what"]: r for r in result("linear_kernels")["rows"] if r["in"] == r["out"] == 8192}
    w, x = square["W for dgrad, from codes"], square["X for wgrad, from codes"]
    bytes_of_dy = square["dY for dgrad and wgrad"]["floor us"]
    assert (codes["warps"], gradient["warps"]) == (3, 2)
    return [
        f"takes {codes['issue us']:.0f} µs if every issue slot is used, and the bytes take "
        f"{w['floor us']:.0f} µs. The kernels take {w['us']:.0f} and {x['us']:.0f} µs: three warps",
        f"{dy['issue us']:.0f} µs of instructions beside {bytes_of_dy:.0f} µs of bytes at 8192",
        f"take {gradient['issue us']:.0f} µs if every issue slot is used, and its bytes "
        f"{gradient['copy us']:.0f} µs. It takes {gradient['us']:.0f} µs, with two warps at once",
    ]


def of_every_recipe() -> list[str]:
    rows = {row["name"]: row for row in result("recipes-step")["rows"]}
    ours, mxfp4 = rows["tetrajet"], rows["mxfp4"]
    made = [row["gpu_ms"]["quantize"] + row["gpu_ms"]["carry"] for row in (ours, mxfp4)]
    states = [rows[f"tetrajet-{method}"] for method in ("ema", "ramping")]
    longer = [f"{row['ms'] / ours['ms'] - 1:.1%}" for row in states]
    more = [f"{row['peak_gib'] - ours['peak_gib']:.1f}" for row in states]
    return [
        f"`tetrajet` takes {ours['ms'] / rows['fp8']['ms']:.2f} of the time of `fp8`",
        f"`mxfp4` takes the time of `tetrajet`, within {mxfp4['ms'] / ours['ms'] - 1:.1%}.",
        f"Its kernels that quantize and convert take {made[0] - made[1]:.0f} ms less.",
        f"take {' and '.join(longer)} more time than `tetrajet`",
        f"{' and '.join(more)} GiB more",
    ]


def of_an_mlp() -> list[str]:
    rows = {
        row["recipe"]: row
        for row in mlp.with_floors_apart(result("mlp")["rows"])
        if row["hidden"] == 4096
    }
    ours, apart = rows["tetrajet"], rows["tetrajet" + mlp.APART]
    more = [f"{row['ms'] / row['floor ms'] - 1:.0%} more" for row in (ours, apart)]
    recipe, (hidden, ffn) = get_recipe("tetrajet"), mlp.SHAPES[0]
    joined, everything = (
        moved(recipe, hidden, ffn) for moved in (mlp.bytes_moved, mlp.bytes_moved_apart)
    )
    plain = linear.moved(recipe, hidden, 2 * ffn) + linear.moved(recipe, ffn, hidden)
    assert plain < joined < everything and ours["floor ms"] < apart["floor ms"]
    return [
        f"`tetrajet` takes {more[0]} than its lower bound, and {more[1]} in the row *apart*",
        f"their kernels move {joined / 1e9:.2f} GB with `tetrajet`, where those of two linears "
        f"without SwiGLU move {plain / 1e9:.2f} GB",
        f"These move {(everything - plain) / 1e9:.2f} GB, and {everything / 1e9:.2f} GB are moved",
        f"is therefore {ours['floor ms']:.2f} ms for joined linears, and "
        f"{apart['floor ms']:.2f} ms for linears apart",
    ]


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
    [own] = [row for row in result("te-step")["rows"] if row["name"] == "bf16"]
    swiglu = [
        sum(ms for ms, _, name in row["largest"] if word in name)
        for row, word in ((result("te-delayed")["rows"][0], "silu"), (own, "swiglu"))
    ]
    times = [row["ms"] for row in result("te-fused-beside")["rows"]]
    fused = [result(f"te-fused-{n}")["rows"] for n in (1, 2)]
    (a, b), (c, d) = ([f"{row['ms']:.0f}" for row in rows] for rows in fused)
    w, x, y, z = (f"{ms:.0f}" for ms in times)
    within = [
        ms / rows[0]["ms"]
        for rows, own in zip(fused, (times[:2], times[2:]), strict=True)
        for ms in own
    ]
    assert all(abs(ratio - 1) < 0.01 for ratio in within)
    own, theirs = (
        [row["ms"] for row in result(f"te-turns{beside}")["rows"]] for beside in ("-beside", "")
    )
    assert all(abs(a / b - 1) < 0.01 for a, b in zip(own, theirs, strict=True))
    turns = [f"{ms[0]:.0f}, {ms[1]:.0f} and {ms[2]:.0f} ms" for ms in (own, theirs)]
    lower = fused[0][0]["peak_gib"] - result("te-fused-beside")["rows"][0]["peak_gib"]
    return [
        f"`tetrajet` takes {turns[0]}, and `te fp8 delayed` with fused operations {turns[1]}",
        f"`tetrajet` takes {w} and {x} ms, `te fp8 delayed` with fused operations between them "
        f"{a} ms, and without them {b} ms; again, {y} and {z}, {c} and {d} ms",
        f"Its peak is {lower:.1f} GiB lower than with fused operations",
        f"SwiGLU takes {swiglu[0]:.0f} ms of the step with delayed scaling, where the SwiGLU "
        f"kernels of this package take {swiglu[1]:.0f} ms in the BF16 row",
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


def of_the_next_target() -> list[str]:
    bf16, ours, _ = result("fused-step")["rows"]
    wanted, spent = bf16["ms"] / 1.5, ours["gpu_ms"]
    return [
        f"**More than {ours['ratio']:.2f}.** For 1.5 times BF16's speed a step would have to take "
        f"{wanted:,.0f} ms, {ours['ms'] - wanted:.0f} less",
        f"that quantize and convert take {spent['quantize'] + spent['carry']:.0f} ms of it",
        f"GEMMs take {spent['gemm']:,.0f} ms",
    ]


def of_commits() -> list[str]:
    names = "linear-te", "linear_kernels", "mlp", "quantize_kernels-fused", "kernel_counters"
    [commit] = {result(name)["stamp"]["commit"][:7] for name in names}
    return [f"are of commit {commit} and one host"]


def of_memory_beside_bf16_with_the_flag() -> list[str]:
    row, times = with_fp8_input()
    none, of_bf16, of_other = with_no_codes_held()
    [low] = [row for row in result("fused-step")["rows"] if row["name"] == LOW]
    return [
        f"its peak is then {row['peak_gib']:.1f} GiB, at {row['ratio']:.2f} times its speed",
        "Without weights, gradients and optimizer the "
        f"{low['peak_gib']:.1f} GiB of `tetrajet` with "
        f"both flags are {times:.2f} times that",
        f"the peak is {none['peak_gib']:.1f} GiB, at {none['ratio']:.2f} times BF16's speed",
        f"{of_bf16:.2f} times BF16's memory, and {of_other:.2f} times that of BF16 with the first",
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


FIGURES = [
    of_a_linear,
    of_a_linear_s_kernels,
    of_instructions,
    of_every_recipe,
    of_an_mlp,
    of_held_elements,
    of_a_training_step,
    of_transformer_engine,
    of_memory,
    of_the_next_target,
    of_commits,
    of_memory_beside_bf16_with_the_flag,
    of_a_step_beside,
    of_other_packages,
]


@pytest.mark.parametrize("figures", FIGURES)
def test_figures_of_one_gpu_are_the_committed_result(figures: Any) -> None:
    says("docs/hopper.md", figures())
