"""Compares Liger-Kernel's functions, as this package calls them, with float64.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_liger

Prints a line for each result that differs by more than the roundings of its computation explain,
and for each known mistake that such a comparison would not notice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from testing.kernels.against_float64 import BATCH, SEQUENCE, Case, Made, U, double, gradients, least


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
