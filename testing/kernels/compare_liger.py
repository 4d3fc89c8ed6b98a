"""Compares Liger-Kernel's functions, as this package calls them, with float64.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_liger

Prints a line for each result that differs by more than the roundings of its computation explain,
and for each known mistake that such a comparison would not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor
from torch.nn import functional as F

SEQUENCE, BATCH = 6, 2
U = 2.0**-24  # the largest relative error of a rounding to FP32


@dataclass(frozen=True)
class Case:
    """name: of the operation. results: of Liger, outputs and gradients. exact: the same in float64.
    bounds: by how much FP32 arithmetic may move each element. roundings: to the dtype of a result,
    of each. mistaken: the exact results of a known mistake."""

    name: str
    results: list[Tensor]
    exact: list[Tensor]
    bounds: list[Tensor]
    roundings: list[int]
    mistaken: list[Tensor]

    def differences(self) -> Iterator[str]:
        if not self._agree(self.exact):
            yield f"{self.name}: {[float(e) for e in self._excess(self.exact)]} times the bounds"
        if self._agree(self.mistaken):
            yield f"{self.name}: a mistake would not be noticed"

    def _agree(self, wanted: list[Tensor]) -> bool:
        return all(bool(excess <= 1) for excess in self._excess(wanted))

    def _excess(self, wanted: list[Tensor]) -> Iterator[Tensor]:
        for result, value, bound, times in zip(
            self.results, wanted, self.bounds, self.roundings, strict=True
        ):
            unit = torch.finfo(result.dtype).eps / 2
            allowed = bound + times * (unit * (value.abs() + bound) + least(result.dtype))
            yield ((result.double().cpu() - value).abs() / allowed).max()


def least(dtype: torch.dtype) -> float:
    """Half of a step between subnormal numbers: what a rounding moves the smallest numbers."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor], dys: list[Tensor]
) -> list[Tensor]:
    """The outputs of `function`, then the gradients of its inputs. dys: those of its outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    made = function(*(leaf * 1 for leaf in leaves))  # what is overwritten is no leaf
    outputs = made if isinstance(made, tuple) else (made,)
    found = [output.detach().clone() for output in outputs]
    return found + list(torch.autograd.grad(outputs, leaves, [dy.clone() for dy in dys]))


class Made:
    """Random inputs of one dtype on one device, and the same in float64 on the CPU."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self._dtype, self._device = dtype, device

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(self._dtype)

    def on(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(self._device) for tensor in tensors]


def double(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def rotary(
    made: Made, batch: int, heads: int, groups: int, d: int, rotated: int, split: bool
) -> Case:
    """split: query and key are views of one tensor, and so not contiguous."""
    from megatron_fp4.mcore.model import liger

    x = [made(SEQUENCE, batch, heads, d), made(SEQUENCE, batch, groups, d)]
    # In attention's order of axes. An axis of one element has a stride that is no distance.
    dys = [made(batch, SEQUENCE, *each.shape[2:]).transpose(0, 1) for each in x]
    half = made(SEQUENCE, 1, 1, rotated // 2, scale=3.0).float()
    freqs, scale = torch.cat((half, half), -1), 1.25

    def ours(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        if split:
            query, key = torch.split(torch.cat((query, key), 2), [heads, groups], 2)
        return liger.rotate(query, key, freqs.to(query.device), scale)

    def upstreams(interleaved: bool) -> list[Tensor]:
        angles = half.repeat_interleave(2, -1) if interleaved else freqs

        def both(*given: Tensor) -> tuple[Tensor, ...]:
            turned = (angles.double(), interleaved)
            each = [_apply_rotary_pos_emb_bshd(t, *turned, mscale=scale) for t in given]
            return tuple(each)

        return gradients(both, double(x), double(dys))

    # Cosine (one ulp, and the scale), the products and the sum are rounded.
    pairs = [t.double().abs() for t in (*x, *dys)]
    bounds = [5 * U * scale * (t + t.roll(rotated // 2, -1) + t.amax(-1, True)) for t in pairs]
    results = gradients(ours, made.on(x), made.on(dys))
    return Case("rotary", results, upstreams(False), bounds, [1] * 4, upstreams(True))


def swiglu(made: Made, n: int) -> Case:
    from megatron_fp4.mcore.model import liger

    x, dy = made(SEQUENCE, BATCH, 2 * n), made(SEQUENCE, BATCH, n)

    def exact(flip: bool) -> list[Tensor]:
        def product(t: Tensor) -> Tensor:
            gate, up = t.chunk(2, -1)[:: -1 if flip else 1]
            return F.silu(gate) * up

        return gradients(product, double([x]), double([dy]))

    # The exponential's argument is rounded, and its error grows with it. The exponential itself and
    # the division are exact to 4 U on a GPU; then there are few roundings.
    gate, up = double([x])[0].chunk(2, -1)
    relative, sigmoid = (16 + 2 * gate.abs()) * U, torch.sigmoid(gate)
    slopes = sigmoid + (gate * sigmoid * (1 - sigmoid)).abs()
    dgate = (dy.double() * up).abs() * slopes * relative
    dup = (dy.double() * F.silu(gate)).abs() * relative
    # SiLU of the gate is rounded to x's dtype, where it may be subnormal, and then multiplied.
    product = (F.silu(gate) * up).abs() * relative + up.abs() * least(x.dtype)
    bounds = [product, torch.cat((dgate, dup), -1)]
    results = gradients(liger.swiglu, made.on([x]), made.on([dy]))
    return Case("swiglu", results, exact(False), bounds, [2, 1], exact(True))


def norm(made: Made, n: int, offset: float, eps: float = 1e-3) -> Case:
    from megatron_fp4.mcore.model import liger

    x, weight, dy = made(SEQUENCE, BATCH, n, scale=0.1), made(n), made(SEQUENCE, BATCH, n)

    def exact(eps: float) -> list[Tensor]:
        def normed(t: Tensor, w: Tensor) -> Tensor:
            return F.rms_norm(t, (n,), w + offset, eps)

        return gradients(normed, double([x, weight]), double([dy]))

    y, dx, dw = exact(eps)
    [t, w, g] = double([x, weight, dy])
    rstd, m = (t.pow(2).mean(-1, True) + eps).rsqrt(), (g * (w + offset)).abs()
    inner = (m * t.abs()).mean(-1, True) * rstd**3 * t.abs()
    rows = SEQUENCE * BATCH
    bounds = [
        (n / 2 + 8) * U * y.abs(),
        (2 * n + 16) * U * (rstd * m + inner),
        (n / 2 + rows + 8) * U * (g * t * rstd).abs().sum((0, 1)),
    ]
    results = gradients(
        lambda t, w: liger.rms_norm(t, w, eps, offset), made.on([x, weight]), made.on([dy])
    )
    return Case(f"norm {offset}", results, [y, dx, dw], bounds, [1] * 3, exact(1.1 * eps))


def loss(made: Made, vocabulary: int) -> Case:
    from megatron_fp4.mcore.model import liger

    logits = made(SEQUENCE, BATCH, vocabulary, scale=3.0)
    labels = torch.arange(SEQUENCE * BATCH).view(BATCH, SEQUENCE) * 7 % vocabulary
    dy = made(BATCH, SEQUENCE).float()

    def exact(labels: Tensor) -> list[Tensor]:
        def losses(t: Tensor) -> Tensor:
            return F.cross_entropy(t.permute(1, 2, 0), labels, reduction="none")

        return gradients(losses, double([logits]), double([dy]))

    value = logits.double()
    shift = (value.amax(-1, True) - value).max()
    hot = F.one_hot(labels, vocabulary).transpose(0, 1)
    share = (torch.softmax(value, -1) + hot) * dy.double().abs().transpose(0, 1)[..., None]
    relative = (vocabulary + 16 + 2 * shift) * U
    bounds = [relative + 4 * U * value.abs().max() + torch.zeros(dy.shape), relative * share]

    def ours(t: Tensor) -> Tensor:
        return liger.cross_entropy(None, labels.to(t.device), t)  # type: ignore[arg-type]

    results = gradients(ours, made.on([logits]), made.on([dy]))
    return Case("loss", results, exact(labels), bounds, [1, 1], exact(labels.roll(1, 1)))


def differences(dtype: torch.dtype, device: str) -> Iterator[str]:
    made = Made(dtype, device)
    for heads, groups, d, rotated in ((4, 2, 16, 16), (3, 1, 24, 16), (4, 4, 8, 8)):
        for batch, split in ((1, False), (1, True), (2, False), (2, True)):
            yield from rotary(made, batch, heads, groups, d, rotated, split).differences()
    for n in (64, 40):
        yield from swiglu(made, n).differences()
        for offset in (0.0, 1.0):
            yield from norm(made, n, offset).differences()
        yield from loss(made, 2 * n + 1).differences()


if __name__ == "__main__":
    from megatron_fp4.mcore.runtime import cpu
    from testing.kernels.liger_interpreter import mend

    cpu.install_in_torch()
    mend()
    print("\n".join(differences(torch.float32, "cpu")))
