"""Quantizers and quantized tensors for Transformer Engine's linears, by this package's recipes.

Transformer Engine (2.16 or newer; tested with 2.20.2) gives each of X, W and dY one quantizer. It
quantizes the tensor along its rows for one GEMM and along its columns for another. Its function
`custom_gemm` then multiplies two such tensors, but ignores the output tensor that it is given. With
--gradient-accumulation-fusion the weight's gradient would therefore not be added to main_grad,
although the parameter is marked as if it had been. This module replaces `custom_gemm`, for its own
tensors only, by a function that writes or adds to the output.

The random bits depend on torch's seed (Megatron sets it from --seed), the rank, and the number of
tensors that the process has quantized. No two ranks share random bits, nor do two of the first
2^32 tensors of a process. A process that resumes a run counts from 0 again.
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
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.errors import ConfigError
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.making import make_operands, source_of
from megatron_fp4.execution.tensor_lists import take_apart
from megatron_fp4.makers.base import MatrixName
from megatron_fp4.multipliers import choose
from megatron_fp4.multipliers.base import Multiplier, Product, format_of
from megatron_fp4.operands import Made, Matrix, Operand
from megatron_fp4.plan.compiler import makings, operand_plan
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import Setting
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

# The GEMM that contracts the last axis of X, W and dY, and the one that contracts the first axis.
ROWS = {"x": "fprop", "w": "fprop", "dy": "dgrad"}
COLUMNS = {"x": "wgrad", "w": "dgrad", "dy": "wgrad"}
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio; its multiples keep the ranks' seeds apart
_calls = itertools.count()


def make(recipe: Recipe, operand: str | None, name: str) -> Quantizer:
    """The quantizer of an operand, as a Quantizer of Transformer Engine.

    operand: "x", "w" or "dy"; None for a tensor that is not quantized. name: the module's. Raises
    ConfigError under --tp-comm-overlap, which ignores the results of custom GEMMs.
    """
    if operand is None:
        return IdentityQuantizer()
    if getattr(te_base, "_ub_communicators", None):
        raise ConfigError(
            "--tp-comm-overlap leaves out what Transformer Engine's custom GEMMs return: drop it"
        )
    _install()
    return RecipeQuantizer(recipe, operand, name)


class RecipeQuantizer(Quantizer):
    """Quantizes X, W or dY for both GEMMs that multiply it.

    It implements Transformer Engine's interface of quantizers. recipe: how operands are made.
    operand: "x", "w" or "dy". name: the module's, from which the random streams follow.
    """

    custom = True

    def __init__(self, recipe: Recipe, operand: str, name: str) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.recipe, self.operand, self.name = recipe, operand, name

    def quantize(
        self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None, **_: Any
    ) -> RecipeTensor:
        """The operands of `tensor` for the GEMMs that Transformer Engine has asked for.

        tensor: [..., columns]. out: a RecipeTensor to update instead. dtype: the model's dtype, if
        it is not that of `tensor` (a weight's may differ).
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        made = RecipeTensor(self, tensor.shape, dtype or tensor.dtype, tensor.device)
        made.rows, made.columns = self._operands(tensor, made.dtype, *self._usages())
        return made

    def update_quantized(
        self, src: Tensor, dst: RecipeTensor, *, noop_flag: Tensor | None = None
    ) -> RecipeTensor:
        """Quantizes `src` again into `dst`, for both GEMMs; returns `dst`.

        Transformer Engine keeps a weight's RecipeTensor for several passes, and updates it by this
        call. Raises ConfigError for a `noop_flag`, by which CUDA graphs skip the update.
        """
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
        matrices: dict[MatrixName, Matrix] = {(self.operand, "model"): matrix}
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
        """The Setting of a linear of which only this matrix is known; other sizes are 0."""
        rows, columns = matrix.shape
        sizes = {
            "x": (rows, columns, 0),
            "w": (0, columns, rows),
            "dy": (rows, 0, columns),
        }
        dtype, target = matrix.dtype, target_of(matrix.device)
        return Setting(*sizes[self.operand], dtype, target, dtype, packs_x=False)

    def is_requantization_safe(self) -> bool:
        """Whether quantizing X again in the backward pass gives the codes that fprop multiplied."""
        quantizer = self.recipe.quantizer(ROWS[self.operand], self.operand)
        return quantizer is None or not quantizer.draws

    def qgemm(self, *_: Any, **__: Any) -> Tensor:
        """Always raises: it is called only if the replacement of `custom_gemm` is bypassed."""
        raise ConfigError(
            "Transformer Engine multiplied past megatron_fp4, which would lose main_grad: another "
            "version than 2.20.2? Use --fp4-recipe without --fp4-format"
        )


class RecipeTensor(QuantizedTensorStorage):
    """The quantized operands that were made from X, W or dY, for one or both of its GEMMs.

    shape, dtype, device: those of the tensor. rows: the operand for the GEMM in `ROWS`. columns:
    the operand for the GEMM in `COLUMNS`. None where it was not made.
    """

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
        """Drops the operands whose usage is False. Raises RuntimeError for a usage that is True if
        its operand was not made."""
        usages = (("rows", rowwise_usage), ("columns", columnwise_usage))
        for which, wanted in usages:
            if wanted and getattr(self, which) is None:
                raise RuntimeError(f"{self._quantizer.operand} was not quantized along {which}")
            if wanted is False:
                setattr(self, which, None)

    def clear(self) -> None:
        self.rows = self.columns = None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], RecipeTensor]:
        """(tensors to save, a RecipeTensor without them whose `restore_from_saved` takes them).

        This RecipeTensor keeps its operands: it may be a weight's, which later passes multiply.
        """
        apart = [take_apart(self.rows), take_apart(self.columns)]
        saved = RecipeTensor(self._quantizer, self._shape, self._dtype, self.device)
        saved._builds = [(len(tensors), build) for tensors, build in apart]
        return [tensor for tensors, _ in apart for tensor in tensors], saved

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Restores the operands from the first of `tensors`; returns the tensors that are left."""
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
    """Replaces Transformer Engine's `custom_gemm` by `product` for RecipeTensors."""
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
    """The keyword arguments of `product` for a call of `custom_gemm` with the arguments `given`.

    Raises ConfigError for a fused GELU or a bias, which `product` does not support.
    """
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
    """X W^T (fprop), dY W (dgrad) or dY^T X (wgrad), of the two tensors in this order.

    out: the tensor that the result is written to, or with `accumulate` added to. Without it a new
    tensor of `out_dtype` (default: a's dtype) is returned: of two axes in wgrad, else of a's shape
    except for the last axis. Raises RuntimeError if an operand was not quantized for this GEMM.
    """
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
    """The length of the contracted axis."""
    if isinstance(operand, QuantizedTensor):
        return operand.shape[operand.axis]
    return operand.shape[1]


@cache
def _multiplier(recipe: Recipe, gemm: str, product: Product, device: torch.device) -> Multiplier:
    """The multiplier of a product. Rank 0 prints it, since Transformer Engine's linears appear in
    no start table."""
    choice = choose(product, target_of(device))
    if _rank() == 0:
        reasons = "".join(f"; not {name}: {why}" for name, why in choice.passed_over)
        _tell(f"megatron-fp4: recipe {recipe.name}: {gemm} on {choice.multiplier.name}{reasons}")
    return choice.multiplier


@cache
def _tell(line: str) -> None:
    """Prints a line, once in a process."""
    print(line)
