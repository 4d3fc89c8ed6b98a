"""Runs the passes of linears as Programs, in C++, once they have been recorded.

A Program is the list of steps of one pass, forward or backward (launches of kernels, products,
operators of PyTorch), with the layout of the memory that they use. The extension runs it for other
tensors, steps and microbatches (sources/program.cpp).

Calls of one kind can run the same Programs: they agree in recipe, shapes, dtypes, and in which
gradients are asked for (`_kind` has all). The first call of a kind runs in Python. The second does
too, and its passes are recorded and made Programs, which run the later calls. Where a recording
cannot be repeated, that kind stays in Python; `Kind.problem` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.cpp.following import CallRecorder, Kind, other_inputs, words
from megatron_fp4.execution.autograd import ForwardContext, LinearFunction, gradients, unread
from megatron_fp4.execution.call import ALONE, Beside, Call, Site
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.recipe import Recipe

KINDS = 64  # of one linear that are remembered: an expert gets ever new numbers of tokens
PLAIN_CALLS = 1  # of a kind, before it is recorded: some kinds have one call in all of a run


@dataclass
class CppExecutor:
    """Executes linears; `linear.execute_by` takes it.

    extension: the module in C++. on_cpu: whether it runs linears on a CPU too, whose host time
    nobody measures; for tests.
    """

    extension: Any
    on_cpu: bool = False

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        site: Site,
        call: Call,
        held: HeldWeight | None,
        beside: Beside = ALONE,
    ) -> Any:
        """What `linear.in_python` returns: in C++ where the kind of this call was recorded, else in
        Python."""
        grad, follower, found = torch.is_grad_enabled(), None, None
        makes_w = held is None or not held.has("fprop")
        if self._may_follow(x if beside.y is None else beside.y, weight, site, call, held):
            kind = _kind(x, weight, bias, recipe, site, call, held, beside, grad)
            if kind.problem is None and kind.calls >= PLAIN_CALLS:
                found = self._in_cpp(kind, x, weight, bias, site, call, held, beside)
                if found is None:
                    follower = CallRecorder(self.extension, kind, site, call, held)
            kind.calls += found is None
        if found is None:
            if held is not None:
                held.to_python()
            found = LinearFunction.apply(
                x, weight, bias, recipe, site, call, held, grad, follower, beside
            )
        if makes_w and held is not None and site.watch is not None:
            site.watch.held(site, weight.to(x.dtype), held)
        return found

    def _may_follow(
        self, x: Tensor, weight: Tensor, site: Site, call: Call, held: HeldWeight | None
    ) -> bool:
        """Whether C++ may run this call, if its kind has been recorded.

        x: X, or what goes through a SwiGLU before the linear.
        """
        if not x.numel():  # an expert without tokens
            return False
        if not x.is_cuda:
            if not self.on_cpu:
                return False
        elif torch._C._cuda_isCurrentStreamCapturing():
            return False
        if call.key.step.__class__ is not int or call.microbatch.__class__ is not int:
            return False  # tensors that a CUDA graph reads
        if site.watch is not None and site.watch.looks(held is not None):
            return False
        if site.observe is not None and (site.tallies is None or site.tallies.from_cpp is None):
            return False
        if torch._C._len_torch_dispatch_stack():
            return False
        return x.is_contiguous() and weight.is_contiguous()

    def _in_cpp(
        self,
        kind: Kind,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        site: Site,
        call: Call,
        held: HeldWeight | None,
        beside: Beside,
    ) -> Any:
        """What `linear.in_python` returns, by a Program; None where none takes this call."""
        template = kind.template
        if template is None:
            return None
        in_cpp = None
        if held is not None:
            if held.in_cpp is None:
                held.in_cpp = self.extension.Held()
            in_cpp = held.in_cpp
            held.to_cpp()
            if not any(known is kind.rebuilds for known in held.rebuilds):
                held.rebuilds.append(kind.rebuilds)
        parameter = weight if kind.adds else None
        context = replace(template, call=call, held=held, weight=parameter)
        made = self.extension.Call(
            kind.passes,
            words(call),
            other_inputs(site, call),
            in_cpp,
            None if site.tallies is None else site.tallies.from_cpp,
            parameter,
            unread(weight.shape, weight.dtype, weight.device) if kind.adds else None,
            partial(self._backward, kind, context),
            beside.y,
            beside.place == "before",
        )
        found = self.extension.linear(x, weight, bias, made)  # [] where no Program takes it
        if not found:
            return None
        return found if beside.place == "before" else found[0]

    def _backward(
        self, kind: Kind, context: ForwardContext, saved: Sequence[Tensor | None], dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of a call that no Program takes, in Python."""
        held, follower = context.held, None
        if held is not None:
            held.to_python()
        if context.plan.saves_w == "operand":
            sent = context.site.sent_w if context.plan.fprop.b.is_sent else None
            shared = sent if held is None else held.made["fprop"].operand
            context = replace(context, shared_w=shared)
        if kind.problem is None and dy.is_contiguous():
            follower = CallRecorder(self.extension, kind, context.site, context.call, held)
        return gradients(context, saved, dy, follower)


def _kind(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site,
    call: Call,
    held: HeldWeight | None,
    beside: Beside,
    grad: bool,
) -> Kind:
    """The kind of this call, among those of its site."""
    device, stream = x.device, 0
    if device.type == "cuda":
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    key = (
        id(recipe), x.shape, x.dtype, weight.shape, weight.dtype, device, stream,
        grad and x.requires_grad, grad and weight.requires_grad,
        None if bias is None else grad and bias.requires_grad,
        site.fuses and hasattr(weight, "main_grad"), call.repeat, call.rows is None, held is None,
        beside.place,
    )  # fmt: skip
    kinds = site.kinds
    found = kinds.pop(key, None)
    if found is None:
        if len(kinds) >= KINDS:
            del kinds[next(iter(kinds))]  # the least recently used
        found = Kind(recipe)
    kinds[key] = found
    return found  # type: ignore[no-any-return]
