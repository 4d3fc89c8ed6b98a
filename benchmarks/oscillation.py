"""How much a weight and its quantized values move from step to step."""

import torch
from torch import Tensor

OSCILLATING = 16.0  # a weight oscillates if its R_w is above this
STEPS = 200  # consecutive steps over which R_w is defined


class Oscillation:
    """The movement of one weight over consecutive steps, and of its quantized values.

    Source: "Oscillation-Reduced MXFP4 Training for Vision Transformers", arXiv 2502.20853: of a
    tensor X_t, r(X) is the mean over t of ||X_t - X_{t-1}|| / ||X_{t-1}||; of an element w,
    R_w = sum_t |Q(w_t) - Q(w_{t-1})| / (sum_t |w_t - w_{t-1}| + 1e-8). All sums are in float64.

    steps: the number of differences so far.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._latest: tuple[Tensor, Tensor] | None = None  # W and Q(W), float64
        self._paths: list[Tensor] = []  # of W and of Q(W): the sum of |differences|, by element
        self._rates = [0.0, 0.0]  # the sum of the relative differences

    def add(self, weight: Tensor, quantized: Tensor) -> None:
        """Adds a step. weight: W. quantized: Q(W), dequantized, of W's shape."""
        w, q = (tensor.detach().to(torch.float64, copy=True) for tensor in (weight, quantized))
        now = w, q
        if self._latest is None:
            self._paths = [torch.zeros_like(tensor) for tensor in now]
        else:
            for i, (new, old) in enumerate(zip(now, self._latest, strict=True)):
                moved = (new - old).abs()
                self._paths[i] += moved
                self._rates[i] += float(moved.norm() / old.norm())
            self.steps += 1
        self._latest = now

    def rate(self) -> float:
        """r(W)."""
        return self._rates[0] / self.steps

    def rate_quantized(self) -> float:
        """r(W_Q)."""
        return self._rates[1] / self.steps

    def ratios(self) -> Tensor:
        """R_w of each element, float64 of W's shape."""
        path, quantized = self._paths
        return quantized / (path + 1e-8)
