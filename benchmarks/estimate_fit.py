"""Fits the rates of megatron_fp4/estimate/rates.py to committed measurements.

    python -m benchmarks.estimate_fit

Prints the rates. Each group of rates is fitted to rows of its own, by least squares of the relative
error. Multi-GPU rows give only what one GPU cannot show: bytes over NVLink, what of them is
exposed, and the host time of layers with collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy

from benchmarks.estimate_rows import Step, Timed, kernels, linears, result, steps
from megatron_fp4.estimate.amounts import Amounts
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.rates import ASSUMED, Rates
from megatron_fp4.estimate.step import StageWork, work_of
from megatron_fp4.estimate.traffic import Sent

Seconds = dict[str, float]
_TP, _DP = ("tp2-sp", "tp4-sp"), ("dp2", "dp4")
# Where GPUs wait for their hosts.
_HOST_BOUND = (("tp2-sp", "tetrajet"), ("tp4-sp", "bf16"), ("tp4-sp", "tetrajet"))
# Kernels of one layer that are told apart in the list of the largest kernels of parallel_step.json
# (one GPU, bf16): activation function; norms and sums of residuals.
_ACTIVATION = ("triton_poi_fused_add_cat_mul", "triton_poi_fused_mul_silu")
_RESIDUAL = ("layer_norm", "GammaBeta", "triton_poi_fused_add_0")


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
    rows = [step for step in steps(("training_step", "training_step-four")) if not skip(step)]
    parallel = [step for step in steps(("parallel_step",)) if not skip(step)]
    alone = [*rows, *(step for step in parallel if step.layout_name == "one")]
    found: Seconds = dict(ASSUMED)
    found |= _quantize(alone, skip)
    found |= _solve(alone, "gemm", ["bf16 operation", "fp8 operation"], found)
    found |= _solve(alone, "attention", ["attention operation"], found)
    found |= _solve(alone, "optimizer", ["parameter updated"], found)
    found |= _other(alone, [step for step in parallel if not step.layout.fused_dw])
    idle = statistics.median(step.row["ms"] / 1e3 / sum(step.gpu.values()) - 1 for step in alone)
    found |= _recipes_by_rows(found, skip)
    found |= _nvlink(parallel, idle)
    gradients, exposed = _gradients(parallel, idle)
    found |= gradients
    found |= _host(parallel)
    return Rates({name: found[name] for name in sorted(found)}, idle, exposed)


# --- one GPU --------------------------------------------------------------------------------------


def _least_squares(rows: Sequence[tuple[Amounts, float]], units: Sequence[str]) -> Seconds:
    """Seconds of each unit that minimize the relative errors of rows (work, seconds)."""
    matrix = numpy.array([[work[unit] / taken for unit in units] for work, taken in rows])
    size = numpy.abs(matrix).max(axis=0)  # units are of very different sizes
    answer, *_ = numpy.linalg.lstsq(matrix / size, numpy.ones(len(rows)), rcond=None)
    found = {unit: float(each / of) for unit, each, of in zip(units, answer, size, strict=True)}
    return {unit: max(each, 0.0) for unit, each in found.items()}


def _less(work: Amounts, taken: float, known: Seconds) -> float:
    """What remains of `taken` seconds after the units whose rate is known."""
    return taken - sum(amount * known.get(unit, 0.0) for unit, amount in work.items())


def _solve(rows: list[Step], kind: str, units: list[str], known: Seconds) -> Seconds:
    fixed = {unit: rate for unit, rate in known.items() if unit == "GEMM" and kind == "gemm"}
    each = [(gpu_amounts(step), step) for step in rows]
    return _least_squares([(w, _less(w, s.gpu[kind], fixed)) for w, s in each], units)


def _quantize(rows: list[Step], skip: Callable[[Step | Timed], bool]) -> Seconds:
    """Conversion from the steps; bytes from the copies, and rounding from the kernels."""
    converting = [step for step in rows if step.row["gpu_ms"].get("carry")]
    carried = [(gpu_amounts(step), step.row["gpu_ms"]["carry"] / 1e3) for step in converting]
    found = _least_squares(carried, ["element converted", "element corrected"])
    copies = [row["copy TB/s"] * 1e12 for row in result("quantize_kernels")["rows"]]
    found["byte quantized"] = 1 / statistics.median(copies)
    mine = [each for each in kernels() if each.file == "quantize_kernels" and not skip(each)]
    kinds = ("rounded to nearest", "rounded stochastically", "transformed")
    units = [f"element {kind}" for kind in (*kinds, "decoded", "in a second direction")]
    left = [(each.amounts, _less(each.amounts, each.seconds, found)) for each in mine]
    # Errors are relative to the kernel's time, not to what remains of it.
    scaled = [
        (Amounts({u: w[u] / each.seconds for u in units}), taken / each.seconds)
        for (w, taken), each in zip(left, mine, strict=True)
    ]
    matrix = numpy.array([[w[unit] for unit in units] for w, _ in scaled])
    size = matrix.max(axis=0)
    answer, *_ = numpy.linalg.lstsq(matrix / size, numpy.array([t for _, t in scaled]), rcond=None)
    rates = {unit: float(each / of) for unit, each, of in zip(units, answer, size, strict=True)}
    return found | {unit: max(each, 0.0) for unit, each in rates.items()}


def _other(rows: list[Step], unfused: list[Step]) -> Seconds:
    """Norms and activation functions from the list of kernels; the rest from whole steps.

    unfused: steps that add dW to main_grad after the GEMM.
    """
    [one] = [s for s in steps(("parallel_step",)) if (s.layout_name, s.name) == ("one", "bf16")]
    work, found = gpu_amounts(one), {}
    for unit, words in (("activation element", _ACTIVATION), ("residual element", _RESIDUAL)):
        listed = [ms for ms, _, name in one.row["largest"] if any(word in name for word in words)]
        found[unit] = sum(listed) / 1e3 / work[unit]
    fused = [step for step in rows if step.layout.fused_dw]
    each = [(gpu_amounts(step), step.gpu["other"]) for step in fused]
    rest = [(w, _less(w, taken, found)) for w, taken in each]
    found |= _least_squares(rest, ["query, key or value", "logit", "parameter"])
    apart = [(gpu_amounts(step), step) for step in unfused]
    added = [(w, _less(w, step.gpu["other"], found)) for w, step in apart]
    return found | _least_squares(added, ["weight accumulated"])


def _recipes_by_rows(known: Seconds, skip: Callable[[Step | Timed], bool]) -> Seconds:
    """Row scales and clamping, from the linears of dge-occ; PyTorch's quantizers, from peers."""
    rows = [each for each in linears() if "dge-occ" in each.name and not skip(each)]
    left = [(each.amounts, _less(each.amounts, each.seconds, known)) for each in rows]
    found = _least_squares(left, ["element with a row scale", "element clamped"])
    [plain] = [each for each in kernels() if each.name == "to NVFP4"]
    return found | _least_squares([(plain.amounts, plain.seconds)], ["element by PyTorch"])


# --- several GPUs ---------------------------------------------------------------------------------


def _sent(step: Step, groups: Iterable[str]) -> list[Sent]:
    """What a rank sends in a step in groups of ranks."""
    [work] = works(step)
    micro = [*work.micro.forward.sent, *work.micro.backward.sent]
    every = [sent.times(step.layout.microbatches) for sent in micro] + work.sent_once
    return [sent for sent in every if sent.group in groups]


def _exposed(step: Step, idle: float) -> float:
    """Seconds of a measured step that no other work of the GPU accounts for."""
    busy = sum(s for kind, s in step.gpu.items() if kind != "communication")
    return step.row["ms"] / 1e3 / (1 + idle) - busy


def _nvlink(rows: list[Step], idle: float) -> Seconds:
    """Bytes over NVLink, from tensor parallelism with graphs, where no GPU waits for its host."""
    mine = [step for step in rows if step.layout_name in _TP and step.layout.graphs]
    each = [(sum(sent.sent for sent in _sent(s, ["tensor"])), _exposed(s, idle)) for s in mine]
    name = "byte over NVLink"
    return _least_squares([(Amounts({name: sent}), taken) for sent, taken in each], [name])


def _gradients(rows: list[Step], idle: float) -> tuple[Seconds, float]:
    """(seconds of a byte of gradients over NVLink, the share of them that is exposed)."""
    mine = [step for step in rows if step.layout_name in _DP]
    name = "byte of gradients over NVLink"
    sent = [sum(one.sent for one in _sent(step, ["data"])) for step in mine]
    taken = [step.gpu["communication"] for step in mine]
    each = [(Amounts({name: s}), t) for s, t in zip(sent, taken, strict=True)]
    rate = _least_squares(each, [name])
    exposed = sum(_exposed(step, idle) for step in mine) / (sum(sent) * rate[name])
    return rate, exposed


def _host(rows: list[Step]) -> Seconds:
    """Host time: of linears from host_linear.json, of a BF16 layer without collectives from
    held_out_loss.json, of a collective from tensor parallelism without graphs."""
    linear = {row["recipe"]: row["us"] / 1e6 for row in result("host_linear")["rows"]}
    quantized = statistics.mean(linear[name] for name in ("mxfp4", "mxfp4-rht-sr", "tetrajet"))
    found = {"BF16 linear": linear["bf16"], "quantized linear": quantized}
    found["linear with outliers"] = linear["dge-occ"]
    small = result("held_out_loss")
    taken = min(small["results"]["bf16"]["ms a step"]) / 1e3 / small["model"]["layers"]
    found["layer"] = taken - 4 * linear["bf16"]
    mine = [step for step in rows if (step.layout_name, step.name) in _HOST_BOUND]
    each = []
    for step in mine:
        [work] = works(step)
        host = Amounts(work.micro.forward.host)
        host.add(work.micro.backward.host)
        spent = step.row["ms"] / 1e3 / step.layout.microbatches
        each.append((host, _less(host, spent, found)))
    return found | _least_squares(each, ["collective"])


def main() -> None:
    rates = fit()
    for unit, each in rates.seconds.items():
        if unit not in ASSUMED:
            print(f'    "{unit}": {each:.4g},')
    print(f"idle={rates.idle:.3g}, exposed={rates.exposed:.3g}")


if __name__ == "__main__":
    main()
