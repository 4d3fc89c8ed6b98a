"""Fits the rates of megatron_fp4/estimate/rates.py to committed measurements.

    python -m benchmarks.estimate_fit

Prints the rates. Each group of rates is fitted to rows of its own, by least squares of the relative
error. Multi-GPU rows give only what one GPU cannot show: bytes over NVLink, what of them is
exposed, and the host time of collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy

from benchmarks import host
from benchmarks.estimate_rows import (
    BY_TORCH,
    CURRENT,
    FEW_BITS,
    LINEARS,
    OUTSIDE,
    Step,
    Timed,
    kernels,
    linears,
    mantissa_scales,
    result,
    steps,
)
from benchmarks.host_worker import LINEARS as TIMED_BY_HOST
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.rates import ASSUMED, UNITS, Idle, Rates, by_torch, seconds
from megatron_fp4.estimate.step import StageWork, work_of
from megatron_fp4.estimate.traffic import Sent

Seconds = dict[str, float]
Rows = Sequence[tuple[Amounts, float]]  # work, and the seconds it took
_TP, _DP = ("tp2-sp", "tp4-sp"), ("dp2", "dp4")
# Kernels of one layer that are told apart in the lists of the largest kernels: sums of residuals;
# and of torch's kernels, in parallel_step.json (one GPU, bf16), those of the activation function
# and of norms.
_SUM = ("triton_poi_fused_add_0",)
_ACTIVATION = ("triton_poi_fused_add_cat_mul", "triton_poi_fused_mul_silu")
_NORM = ("layer_norm", "GammaBeta")


@cache
def works(step: Step) -> list[StageWork]:
    """The work of a measured step's stages."""
    return work_of(step.model, step.layout, step.recipe, MEASURED)


def gpu_amounts(step: Step) -> Amounts:
    """The work of one GPU in a step, as a mean over the pipeline stages, without communication."""
    found = Amounts()
    for work in works(step):
        for part in (work.micro.forward, work.micro.backward):
            found.add(part.gpu, step.layout.microbatches / step.layout.pp)
        found.add(work.once, 1 / step.layout.pp)
    return found


def fit(skip: Callable[[Step | Timed], bool] = lambda row: False) -> Rates:
    """The rates, fitted to all rows that `skip` does not leave out."""
    now, before = (
        [step for step in steps(files) if not skip(step)] for files in (CURRENT, BY_TORCH)
    )
    alone, alone_before = (
        [step for step in rows if step.layout_name == "one"] for rows in (now, before)
    )
    found: Seconds = dict(ASSUMED)
    found |= _carry(alone + alone_before)
    quantizing, share = _quantize(alone, skip)
    found |= quantizing
    found |= _solve(alone, "gemm", ["bf16 operation", "fp8 operation"], found)
    found |= _solve(alone, "attention", ["attention operation"], found)
    found |= _solve(alone, "optimizer", ["parameter updated"], found)
    found |= _solve(alone_before, "optimizer", [by_torch("parameter updated")], found)
    found |= _fused(alone)
    found |= _by_torch([step for step in alone_before if step.layout.fused_dw])
    idle = Idle(_idle(alone), _idle(alone_before))
    found |= _recipes_by_rows(found, skip)
    parallel = [step for step in now + before if step.layout.pp == 1]  # pipelines are predicted
    found |= _accumulated([step for step in parallel if not step.layout.fused_dw], found)
    found |= _nvlink(parallel, idle)
    gradients, exposed = _gradients(parallel, idle)
    found |= gradients | _gradients_in_few_bits()
    found |= _host([step for step in parallel if step in now], found)
    return Rates({name: found[name] for name in sorted(found)}, idle, exposed, share)


# --- one GPU --------------------------------------------------------------------------------------


def _least_squares(
    rows: Rows, units: Sequence[str], whole: Sequence[float] | None = None
) -> Seconds:
    """Seconds of each unit that minimize the relative errors of rows.

    whole: the seconds of each row to which its error is relative; None: those of the row itself.
    """
    taken = numpy.array([seconds for _, seconds in rows])
    each = taken if whole is None else numpy.array(whole)
    matrix = numpy.array([[work[unit] for unit in units] for work, _ in rows]) / each[:, None]
    size = numpy.abs(matrix).max(axis=0)  # units are of very different sizes
    answer, *_ = numpy.linalg.lstsq(matrix / size, taken / each, rcond=None)
    found = {unit: float(each / of) for unit, each, of in zip(units, answer, size, strict=True)}
    return {unit: max(each, 0.0) for unit, each in found.items()}


def _less(work: Amounts, taken: float, known: Seconds) -> float:
    """What remains of `taken` seconds after the units whose rate is known."""
    return taken - sum(amount * known.get(unit, 0.0) for unit, amount in work.items())


def _solve(rows: list[Step], kind: str, units: list[str], known: Seconds) -> Seconds:
    fixed = {unit: rate for unit, rate in known.items() if unit == "GEMM" and kind == "gemm"}
    each = [(gpu_amounts(step), step) for step in rows]
    return _least_squares([(w, _less(w, s.gpu[kind], fixed)) for w, s in each], units)


def _idle(rows: list[Step]) -> float:
    """The share of a step in which a GPU waits between kernels."""
    return statistics.median(step.row["ms"] / 1e3 / sum(step.gpu.values()) - 1 for step in rows)


def _carry(rows: list[Step]) -> Seconds:
    """Conversion to FP8."""
    converting = [step for step in rows if step.row["gpu_ms"].get("carry")]
    carried = [(gpu_amounts(step), step.row["gpu_ms"]["carry"] / 1e3) for step in converting]
    return _least_squares(carried, ["element converted", "element corrected"])


def _quantize(rows: list[Step], skip: Callable[[Step | Timed], bool]) -> tuple[Seconds, float]:
    """(seconds of each unit of kernels that quantize in a step, `Rates.alone`).

    Bytes are from the copies and rounding from the kernels in benchmarks of their own, both times
    one factor from the steps.
    """
    mine = [each for each in kernels() if each.file != "peers"]
    copies = [row["copy TB/s"] * 1e12 for row in result(mine[0].file)["rows"]]
    found = {"byte quantized": 1 / statistics.median(copies)}
    mine = [each for each in mine if not skip(each)]
    kinds = (
        *("rounded to nearest", "rounded stochastically", "drawn", "transformed", "decoded"),
        *("in a second direction", "normed", "of SwiGLU's gradient", "corrected"),
    )
    units = [f"element {kind}" for kind in kinds]
    left = [(each.amounts, _less(each.amounts, each.seconds, found)) for each in mine]
    found |= _least_squares(left, units, [each.seconds for each in mine])
    del found["element corrected"]  # another kernel in steps; see `_carry`
    quantizing = [step for step in rows if step.row["gpu_ms"].get("quantize")]
    each = [(gpu_amounts(step), step.row["gpu_ms"]["quantize"] / 1e3) for step in quantizing]
    sums = [(Amounts({"all": -_less(work, 0.0, found)}), taken) for work, taken in each]
    factor = _least_squares(sums, ["all"])["all"]
    return {unit: factor * rate for unit, rate in found.items()}, 1 / factor


def _fused(rows: list[Step]) -> Seconds:
    """Fused kernels outside the linears: those of a layer by their kind and by name, the rest of
    "other" from whole steps."""
    found: Seconds = {}
    for unit, kind, names in (
        ("activation element", "swiglu", ()),
        ("query, key or value", "rotary", ()),
        ("residual element", "norm", _SUM),
    ):
        each = [
            (gpu_amounts(step), step.row["gpu_ms"].get(kind, 0.0) / 1e3 + _listed(step, names))
            for step in rows
        ]
        found |= _least_squares([(work, taken) for work, taken in each if taken], [unit])
    rest = [(gpu_amounts(step), _rest_of_other(step)) for step in rows]
    return found | _least_squares(rest, ["logit", "parameter"])


def _rest_of_other(step: Step) -> float:
    """The seconds in a step of the kernels outside the linears, but for those of SwiGLU, rotary
    embeddings and norms and the sums of residuals, whose rates `_fused` fits by themselves."""
    kinds = [kind for kind in ("other", *OUTSIDE) if kind not in ("swiglu", "rotary", "norm")]
    taken = sum(step.row["gpu_ms"].get(kind, 0.0) for kind in kinds)
    return taken / 1e3 - _listed(step, _SUM)


def _listed(step: Step, words: Sequence[str]) -> float:
    """Seconds of the kernels in whose names one of the words occurs, in the list of the largest."""
    listed = [ms for ms, _, name in step.row["largest"] if any(word in name for word in words)]
    return float(sum(listed)) / 1e3


def _by_torch(rows: list[Step]) -> Seconds:
    """torch's kernels outside the linears: norms and activation functions from the list of kernels
    of one row, the rest from whole steps."""
    [one] = [s for s in steps(("parallel_step",)) if (s.layout_name, s.name) == ("one", "bf16")]
    work, found = gpu_amounts(one), {}
    for name, words in (("activation element", _ACTIVATION), ("residual element", _NORM + _SUM)):
        found[by_torch(name)] = _listed(one, words) / work[by_torch(name)]
    each = [(gpu_amounts(step), step.gpu["other"]) for step in rows]
    rest = [(w, _less(w, taken, found)) for w, taken in each]
    units = [by_torch(name) for name in ("query, key or value", "logit", "parameter")]
    return found | _least_squares(rest, units)


def _accumulated(rows: list[Step], known: Seconds) -> Seconds:
    """dW that is added to main_grad after the GEMM."""
    each = [(gpu_amounts(step), step) for step in rows]
    added = [(w, _less(w, step.gpu["other"], _outside(known))) for w, step in each]
    return _least_squares(added, ["weight accumulated"])


def _outside(known: Seconds) -> Seconds:
    """The rates of work that is counted as "other"."""
    return {unit: rate for unit, rate in known.items() if UNITS[unit].kind == "other"}


def _recipes_by_rows(known: Seconds, skip: Callable[[Step | Timed], bool]) -> Seconds:
    """Row scales and clamping, from the linears of fp8 and dge-occ; PyTorch's quantizers, from
    peers."""
    mine = [each for each in linears() if each.file == LINEARS[0] and not skip(each)]
    rows = [each for each in mine if each.amounts["element with a row scale"]]
    left = [(each.amounts, _less(each.amounts, each.seconds, known)) for each in rows]
    found = _least_squares(left, ["element with a row scale", "element clamped"])
    found |= _mantissa_scales(known, skip)
    [plain] = [each for each in kernels() if each.name == "to NVFP4"]
    return found | _least_squares([(plain.amounts, plain.seconds)], ["element by PyTorch"])


def _mantissa_scales(known: Seconds, skip: Callable[[Step | Timed], bool]) -> Seconds:
    """Seconds an element that quantizing under E4M3 block scales takes beside quantizing under
    E8M0, fitted to the kernels of the recipes `nvfp4-nvidia` and `four-over-six`. known: the rates
    that are fitted already."""
    mine = [each for each in mantissa_scales() if not skip(each)]
    kinds = "with a mantissa scale", "of four over six", "transformed, mantissa scale"
    left = [(each.amounts, _less(each.amounts, each.seconds, known)) for each in mine]
    return _least_squares(left, [f"element {kind}" for kind in kinds], [e.seconds for e in mine])


# --- several GPUs ---------------------------------------------------------------------------------


def _sent(step: Step, groups: Iterable[str]) -> list[Sent]:
    """What a rank sends in a step in groups of ranks."""
    [work] = works(step)
    micro = [*work.micro.forward.sent, *work.micro.backward.sent]
    every = [sent.times(step.layout.microbatches) for sent in micro] + work.sent_once
    return [sent for sent in every if sent.group in groups]


def _exposed(step: Step, idle: Idle) -> float:
    """Seconds of a measured step that no other work of the GPU accounts for."""
    busy = sum(s for kind, s in step.gpu.items() if kind != "communication")
    return step.row["ms"] / 1e3 / (1 + idle.of(step.layout)) - busy


def _nvlink(rows: list[Step], idle: Idle) -> Seconds:
    """Bytes over NVLink, from tensor parallelism with graphs, where no GPU waits for its host."""
    mine = [step for step in rows if step.layout_name in _TP and step.layout.graphs]
    each = [(sum(sent.sent for sent in _sent(s, ["tensor"])), _exposed(s, idle)) for s in mine]
    name = "byte over NVLink"
    return _least_squares([(Amounts({name: sent}), taken) for sent, taken in each], [name])


def _gradients(rows: list[Step], idle: Idle) -> tuple[Seconds, float]:
    """(seconds of a byte of gradients over NVLink, the share of them that is exposed)."""
    mine = [step for step in rows if step.layout_name in _DP]
    name = "byte of gradients over NVLink"
    sent = [sum(one.sent for one in _sent(step, ["data"])) for step in mine]
    taken = [step.gpu["communication"] for step in mine]
    each = [(Amounts({name: s}), t) for s, t in zip(sent, taken, strict=True)]
    rate = _least_squares(each, [name])
    exposed = sum(_exposed(step, idle) for step in mine) / (sum(sent) * rate[name])
    return rate, exposed


def _gradients_in_few_bits() -> Seconds:
    """Seconds of each gradient that is sent in few bits, in FP8 and in BF16: of the kernels that
    encode it, and of those that decode and sum what ranks receive."""
    mine = [step for step in steps(FEW_BITS) if step.layout.gradients is not None]
    each = [(gpu_amounts(step), step.row["gpu_ms"]["gradients"] / 1e3) for step in mine]
    return _least_squares(each, ["gradient in fp8", "gradient in bf16"])


def _host(rows: list[Step], known: Seconds) -> Seconds:
    """Host time: of linears from host.json, of a BF16 layer without collectives from
    held_out_loss.json; of collectives the most that every step of tensor parallelism without
    graphs leaves for them."""
    found = {
        "BF16 linear": _linear_on_host("upstream bf16"),
        "quantized linear": _linear_on_host("tetrajet", "fp8"),
        "linear with outliers": _linear_on_host("dge-occ"),
    }
    small = result("held_out_loss")
    taken = min(small["results"]["bf16"]["ms a step"]) / 1e3 / small["model"]["layers"]
    found["layer"] = taken - 4 * found["BF16 linear"]
    for unit in ("collective", "collective in C++"):
        mine = [step for step in rows if step.layout_name in _TP and not step.layout.graphs]
        bounds = [_left_to_collectives(step, unit, found, known) for step in mine]
        found[unit] = min((bound for bound in bounds if bound is not None), default=0.0)
    return found


def _hosts() -> list[host.Row]:
    """The measured host times of linears: the rows of host-recorded.json, and those of host.json
    without dge-occ. When host.json was measured, the backward pass of dge-occ's fc1 still ran in
    Python (docs/notes/host.md)."""
    earlier = [row for row in result("host")["rows"] if row["name"] != "dge-occ"]
    return earlier + result("host-recorded")["rows"]


def _linear_on_host(*names: str) -> float:
    """Seconds of the host for a linear of these recipes. Processes differ in speed, so each time is
    relative to torch's linear beside it, whose median is taken."""
    rows = _hosts()
    plain = statistics.median(row[f"torch {each}"] for row in rows for each in TIMED_BY_HOST)
    times = [
        host.relative(row, each) for row in rows for each in TIMED_BY_HOST if row["name"] in names
    ]
    return statistics.mean(times) * plain / 1e6


def _left_to_collectives(step: Step, unit: str, host: Seconds, known: Seconds) -> float | None:
    """The most seconds that the host can take for each collective in a step: no step takes less
    than the host takes to launch it, beside what it does once. None if it has no such collective.
    """
    [work] = works(step)
    amounts = Amounts(work.micro.forward.host)
    amounts.add(work.micro.backward.host)
    if not amounts[unit]:
        return None
    once = sum(seconds(work.once, MEASURED, known).values())
    spent = (step.row["ms"] / 1e3 - once) / step.layout.microbatches
    return max(0.0, _less(amounts, spent, host) / amounts[unit])


def main() -> None:
    rates = fit()
    for unit, each in rates.seconds.items():
        if unit not in ASSUMED:
            print(f'    "{unit}": {each:.4g},')
    print(f"idle={rates.idle}, exposed={rates.exposed:.3g}, alone={rates.alone:.3g}")


if __name__ == "__main__":
    main()
