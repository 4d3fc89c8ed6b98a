"""Quantizers and quantized tensors of Transformer Engine's kind around this package's.

Transformer Engine (2.16 or newer; run with 2.20.2) quantizes X, W and dY each by one quantizer,
along its rows for one GEMM and along its columns for another, and brings two such tensors to
`custom_gemm`, which has the output in hand and loses it: with --gradient-accumulation-fusion the
weight's gradient would be in no main_grad, and the parameter marked as if it were. So `custom_gemm`
is replaced, for tensors of this module alone, by one that adds.

Noise is keyed with torch's seed (Megatron sets it from --seed), the rank, and how many tensors the
process has quantized: no two calls and no two ranks share any.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.errors import ConfigError
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.making import make_operands, source_of
from megatron_fp4.linear import take_apart
from megatron_fp4.multipliers import choose
from megatron_fp4.multipliers.base import Multiplier, Product, format_of
from megatron_fp4.operands import Made, Operand
from megatron_fp4.plan.compiler import makings, operand_plan
from megatron_fp4.plan.data import Source
from megatron_fp4.plan.setting import Setting
from megatron_fp4.recipe import Recipe
from megatron_fp4.target import target_of

try:
    from transformer_engine.pytorch.cpp_extensions import gemm as te_gemm
    from transformer_engine.pytorch.module import base as te_base
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    _replaced = te_gemm.custom_gemm
except (ImportError, AttributeError) as error:
    raise ConfigError(
        "megatron_fp4.te needs Transformer Engine 2.16 or newer (2.20.2 is known to work): "
        f"{' '.join(str(error).split())}"
    ) from error

# The GEMMs that take X, W and dY along their rows, and along their columns.
ROWS = {"x": "fprop", "w": "fprop", "dy": "dgrad"}
COLUMNS = {"x": "wgrad", "w": "dgrad", "dy": "wgrad"}
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: sets ranks' seeds far apart
_calls = itertools.count()


def make(recipe: Recipe, operand: str | None, name: str) -> Quantizer:
    """The quantizer of an operand, None for a tensor that is not quantized. Raises ConfigError for
    what Transformer Engine would do wrong with it."""
    if operand is None:
        return IdentityQuantizer()
    if getattr(te_base, "_ub_communicators", None):
        raise ConfigError(
            "--tp-comm-overlap leaves out what Transformer Engine's custom GEMMs return: drop it"
        )
    _install()
    return RecipeQuantizer(recipe, operand, name)


class RecipeQuantizer(Quantizer):
    """Makes of X, W or dY the operands of both GEMMs that it is in."""

    custom = True

    def __init__(self, recipe: Recipe, operand: str, name: str) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.recipe, self.operand, self.name = recipe, operand, name

    def quantize(
        self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None, **_: Any
    ) -> RecipeTensor:
        """tensor: [..., columns]. dtype: that of the model, where `tensor` is a weight's own."""
        if out is not None:
            return self.update_quantized(tensor, out)
        made = RecipeTensor(self, tensor.shape, dtype or tensor.dtype, tensor.device)
        made.rows, made.columns = self._operands(tensor, made.dtype, *self._usages())
        return made

    def update_quantized(
        self, src: Tensor, dst: RecipeTensor, *, noop_flag: Tensor | None = None
    ) -> RecipeTensor:
        """`dst` made anew, along rows and columns: it is a weight's, kept for several passes."""
        if noop_flag is not None:
            raise ConfigError("CUDA graphs cannot skip quantizing a weight: leave them out")
        dst.rows, dst.columns = self._operands(src, dst.dtype, True, True)
        return dst

    def _usages(self) -> tuple[bool, bool]:
        return self.rowwise_usage, self.columnwise_usage

    def _operands(
        self, tensor: Tensor, dtype: torch.dtype, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).to(dtype)
        setting = self._setting(matrix)
        first, second = (
            operand_plan(self.recipe, where[self.operand], self.operand, setting)
            for where in (ROWS, COLUMNS)
        )
        site, call = Site(self.name or "linear"), Call(_next_key())
        matrices: dict[tuple[str, Source], Operand] = {(self.operand, "model"): matrix}
        if second.source == "model":
            wanted = [first] * rows + [second] * columns
            made = make_operands(makings(wanted, setting), matrices, {}, site, call)
        else:  # backward takes the operand that fprop multiplied
            made = make_operands(makings([first], setting), matrices, {}, site, call)
            if columns:
                source, _ = source_of(second, made[first].operand, first, site, call)
                matrices = {(self.operand, second.source): source}
                made |= make_operands(makings([second], setting), matrices, {}, site, call)
        return (
            made[first].operand if rows else None,
            made[second].operand if columns else None,
        )

    def _setting(self, matrix: Tensor) -> Setting:
        """What is known here of the linear: one of its matrices."""
        rows, columns = matrix.shape
        sizes = {
            "x": (rows, columns, 0),
            "w": (0, columns, rows),
            "dy": (rows, 0, columns),
        }
        dtype, target = matrix.dtype, target_of(matrix.device)
        return Setting(*sizes[self.operand], dtype, target, dtype, packs_x=False)

    def is_requantization_safe(self) -> bool:
        """Whether what backward makes of a saved X is what forward multiplied."""
        quantizer = self.recipe.quantizer(ROWS[self.operand], self.operand)
        return quantizer is None or not quantizer.stochastic

    def qgemm(self, *_: Any, **__: Any) -> Tensor:
        """Never called while `custom_gemm` is this module's."""
        raise ConfigError(
            "Transformer Engine multiplied past megatron_fp4, which would lose main_grad: another "
            "version than 2.20.2? Use --fp4-recipe without --fp4-format"
        )


class RecipeTensor(QuantizedTensorStorage):
    """X, W or dY, of `shape`, as one or both GEMMs multiply it."""

    custom = True

    def __init__(
        self, quantizer: RecipeQuantizer, shape: Iterable[int], dtype: torch.dtype, device: Any
    ) -> None:
        self._quantizer, self._dtype, self.device = quantizer, dtype, device
        self._shape = torch.Size(shape)
        self.rows: Operand | None = None
        self.columns: Operand | None = None
        self._builds: list[tuple[int, Callable[..., Any]]] = []

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.rows is not None, "columnwise": self.columns is not None}

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drops operands; one that is missing cannot be made."""
        usages = (("rows", rowwise_usage), ("columns", columnwise_usage))
        for which, wanted in usages:
            if wanted and getattr(self, which) is None:
                raise RuntimeError(f"{self._quantizer.operand} was not quantized along {which}")
            if wanted is False:
                setattr(self, which, None)

    def clear(self) -> None:
        self.rows = self.columns = None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], RecipeTensor]:
        """(tensors, what takes them back). This one stays whole: it may be a weight's that later
        passes multiply."""
        apart = [take_apart(self.rows), take_apart(self.columns)]
        saved = RecipeTensor(self._quantizer, self._shape, self._dtype, self.device)
        saved._builds = [(len(tensors), build) for tensors, build in apart]
        return [tensor for tensors, _ in apart for tensor in tensors], saved

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Takes its own tensors back; returns the others."""
        rest, operands = list(tensors), []
        for count, build in self._builds:
            operands.append(build(*rest[:count]))
            rest = rest[count:]
        self.rows, self.columns = operands
        return rest


def _next_key() -> Key:
    return Key((torch.initial_seed() + _GOLDEN * _rank()) % 2**64, next(_calls))


def _rank() -> int:
    ranks = torch.distributed
    return ranks.get_rank() if ranks.is_available() and ranks.is_initialized() else 0


# --- products -------------------------------------------------------------------------------------


@cache
def _install() -> None:
    """Has Transformer Engine multiply by `product` what is this module's."""
    signature = inspect.signature(_replaced)

    def custom_gemm(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        a, b = given.arguments["A"], given.arguments["B"]
        if not (isinstance(a, RecipeTensor) and isinstance(b, RecipeTensor)):
            return _replaced(*args, **kwargs)
        return product(b, a, **_asked(given.arguments)), None, None, None

    te_gemm.custom_gemm = custom_gemm


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """`product`'s arguments of `custom_gemm`'s. Raises ConfigError for what it cannot do."""
    if given["gelu"]:
        raise ConfigError("a GELU cannot be fused into a GEMM of megatron_fp4.te: leave it out")
    if given["bias"] is not None:
        raise ConfigError(
            "Transformer Engine has no bias gradient for quantizers of others: add "
            "--disable-bias-linear, or use --fp4-recipe without --fp4-format"
        )
    gemm = {"NN": "dgrad", "NT": "wgrad"}[given["layout"]] if given["grad"] else "fprop"
    names = ("out_dtype", "out", "accumulate")
    return {"gemm": gemm} | {name: given[name] for name in names}


def product(
    a: RecipeTensor,
    b: RecipeTensor,
    *,
    gemm: str,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """X W^T, dY W or dY^T X. out: written, or added to; else a tensor of `out_dtype`, of a's shape
    but for the last axis, and of two axes in wgrad."""
    recipe, dtype = a._quantizer.recipe, a.dtype

    def operand(of: RecipeTensor, found: Operand | None) -> Operand:
        if found is None:
            raise RuntimeError(f"{of._quantizer.operand} was not quantized for {gemm}")
        return found

    operands = (
        operand(a, a.columns if gemm == "wgrad" else a.rows),
        operand(b, b.rows if gemm == "fprop" else b.columns),
    )
    wanted = out_dtype or dtype if out is None else out.dtype
    adds = out is not None and accumulate
    left, right = operands
    shape, correction = (_rows(left), _rows(right), _length(left)), recipe.gemm(gemm).correction
    asked = Product(format_of(left), format_of(right), shape, dtype, wanted, adds, correction)
    multiplier = _multiplier(recipe, gemm, asked, a.device)
    letters = a._quantizer.operand, b._quantizer.operand
    first, second = multiplier.decode([*map(Made, operands)], letters, dtype)
    made = multiplier.multiply(first, second, correction, wanted, out if adds else None)
    if out is not None:
        return made if adds else out.copy_(made)
    return made if gemm == "wgrad" else made.view(*a.shape[:-1], made.shape[-1])


def _rows(operand: Operand) -> int:
    return len(operand.codes if isinstance(operand, QuantizedTensor) else operand)


def _length(operand: Operand) -> int:
    """The contracted length."""
    if isinstance(operand, QuantizedTensor):
        return operand.shape[operand.axis]
    return operand.shape[1]


@cache
def _multiplier(recipe: Recipe, gemm: str, product: Product, device: torch.device) -> Multiplier:
    """Who multiplies; rank 0 says so, since upstream's layers have no start table."""
    choice = choose(product, target_of(device))
    if _rank() == 0:
        reasons = "".join(f"; not {name}: {why}" for name, why in choice.passed_over)
        _tell(f"megatron-fp4: recipe {recipe.name}: {gemm} on {choice.multiplier.name}{reasons}")
    return choice.multiplier


@cache
def _tell(line: str) -> None:
    """Prints a line, once in a process."""
    print(line)
