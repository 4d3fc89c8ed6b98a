"""Replaces linears, and modules for fused kernels, in a specification of layers by this package's.

A specification is a tree of Megatron's ModuleSpecs, dataclasses of submodules and functools.partial
objects, whose leaves are classes. The classes are replaced before Megatron builds anything, so that
initialization, process groups and checkpoints are those of the built modules from the start.
C stands for megatron/core.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear
from megatron_fp4.mcore.model.mlp import GatedMLP
from megatron_fp4.mcore.model.norm import Norm
from megatron_fp4.mcore.model.norm_linear import Fp4NormColumnParallelLinear
from megatron_fp4.mcore.model.self_attention import RotatingSelfAttention

# Of Transformer Engine's linears in Megatron, by name in C/extensions/transformer_engine.py. The
# first that a class derives from counts.
_OF_TRANSFORMER_ENGINE = {
    "TELayerNormColumnParallelLinear": Fp4NormColumnParallelLinear,
    "TEColumnParallelLinear": Fp4ColumnParallelLinear,
    "TERowParallelLinear": Fp4RowParallelLinear,
}
_FUSABLE: dict[type, type] = {
    SelfAttention: RotatingSelfAttention,
    MLP: GatedMLP,
    WrappedTorchNorm: Norm,
}
# Modules that multiply for themselves, in the same file, and what to do instead.
_REFUSED = {
    "TEGroupedLinear": "leave out --moe-grouped-gemm, the experts run one after the other",
    "TEFusedMLP": "leave out --use-transformer-engine-op-fuser",
}


def followed[S](spec: S) -> S:
    """A copy of `spec` whose column- and row-parallel linears are this package's.

    These are Megatron's and Transformer Engine's, and classes that derive from Megatron's, which
    keep what they change. A norm that is fused with a linear becomes a norm and a linear in one
    module, with the same checkpoint keys. Everything else is the same object as in `spec`.

    Raises ConfigError for a linear whose GEMM cannot be replaced.
    """
    return _replaced(spec, _class_for)


def fusable[S](spec: S) -> S:
    """A copy of `spec` whose modules can be given fused kernels (model/fused_kernels.py).

    These are Megatron's own self-attention, MLP and norm of torch. Classes that derive from them
    stay as they are.
    """
    return _replaced(spec, lambda kind: _FUSABLE.get(kind, kind))


def _replaced(part: Any, class_for: Callable[[type], type]) -> Any:
    """A copy of `part`, in which each class is the one that `class_for` returns for it."""
    if isinstance(part, type):
        return class_for(part)
    if inspect.ismethod(part) and isinstance(part.__self__, type):
        return getattr(class_for(part.__self__), part.__name__)
    if isinstance(part, functools.partial):
        given = {name: _replaced(value, class_for) for name, value in part.keywords.items()}
        func = _replaced(part.func, class_for)
        return functools.partial(func, *(_replaced(each, class_for) for each in part.args), **given)
    if isinstance(part, list | tuple):
        return type(part)(_replaced(each, class_for) for each in part)
    if isinstance(part, ModuleSpec) and isinstance(part.module, tuple):
        part = copy.copy(part)
        part.module = import_module(part.module)
    if is_dataclass(part):
        made = copy.copy(part)
        for field in fields(made):
            value = _replaced(getattr(part, field.name), class_for)
            object.__setattr__(made, field.name, value)  # the dataclass may be frozen
        if isinstance(made, ModuleSpec) and getattr(part, "module", None) is MLP:
            made.module = MLP  # C/transformer/transformer_layer.py knows this form by its class
        return made
    return part


@functools.cache
def _class_for(kind: type) -> type:
    """The class that is built in place of `kind`: one of this package for a linear or an MLP, else
    `kind` itself. Raises ConfigError for a class that cannot be replaced."""
    _refuse(kind)
    if issubclass(kind, Fp4ColumnParallelLinear | Fp4RowParallelLinear):
        return kind
    if kind is MLP:
        return GatedMLP
    for stock, ours in (
        (ColumnParallelLinear, Fp4ColumnParallelLinear),
        (RowParallelLinear, Fp4RowParallelLinear),
    ):
        if issubclass(kind, stock):
            return ours if kind is stock else _derived(kind, stock, ours)
    for name, ours in _OF_TRANSFORMER_ENGINE.items():
        if _derives(kind, name):
            if kind.__module__ != transformer_engine.__name__:
                raise ConfigError(
                    f"{kind.__name__} changes Transformer Engine's {name}, which this package "
                    "replaces as a whole: derive it from Megatron's ColumnParallelLinear or "
                    "RowParallelLinear, or leave out the recipe"
                )
            return ours
    return kind


def _derived(kind: type, stock: type, ours: type) -> type:
    """A class that is `kind`, a user's subclass of `stock`, with the GEMMs of `ours`.

    Raises ConfigError if `kind` has replaced a method that `ours` replaces too.
    """
    for name in ("_forward_impl", "forward"):
        replaced = getattr(ours, name) is not getattr(stock, name)
        if replaced and getattr(kind, name) is not getattr(stock, name):
            raise ConfigError(
                f"{kind.__name__} has a {name} of its own, which this package replaces: move "
                "the change to the module that calls the linear, or leave out the recipe"
            )
    keeps_forward = getattr(kind, "forward", None) is getattr(stock, "forward", None)
    return type(f"Fp4{kind.__name__}", (ours, kind), {"may_join": keeps_forward})


def _refuse(kind: Any) -> None:
    for name, remedy in _REFUSED.items():
        if _derives(kind, name):
            raise ConfigError(f"the layers use {kind.__name__}, which follows no recipe: {remedy}")


def _derives(kind: Any, name: str) -> bool:
    """Whether `kind` is, or derives from, the class `name` of C/extensions/transformer_engine.py.

    Without Transformer Engine that file has no such classes.
    """
    base = getattr(transformer_engine, name, None)
    return isinstance(kind, type) and isinstance(base, type) and issubclass(kind, base)
