"""Injects a known mistake into the kernels.

A mistake replaces one helper that the kernels call. In Triton's interpreter a function under
`@triton.jit` is a Python function, which looks its helpers up in the globals of its module at each
call. So the wrong helper can be a Python function too, and it takes effect as soon as it is bound
to the right one's name. Nothing depends on how the source is written.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

PACKAGE = "megatron_fp4.kernels."


@dataclass(frozen=True)
class Mistake:
    """A known mistake, and what must notice it.

    cases: words that choose cases of the comparison, "" for all.
    helper: a function in megatron_fp4.kernels, jitted or of the host.
    wrong: called in its place with `helper` as the first argument, then the arguments of the call.
    """

    cases: str
    helper: Any
    wrong: Callable[..., Any]


def bind(helper: Any, wrong: Callable[..., Any]) -> None:
    """Replaces `helper` by `wrong`, with `helper` as its first argument, in every module of PACKAGE
    that has it, until the process ends. Raises LookupError where no module has it."""
    places = [
        (vars(module), name)
        for path, module in sys.modules.items()
        if path.startswith(PACKAGE)
        for name, value in vars(module).items()
        if value is helper
    ]
    if not places:
        raise LookupError(f"no module of {PACKAGE} has {helper}")
    for names, name in places:
        names[name] = partial(wrong, helper)


def argument(name: str, wrong: Callable[[Any], Any]) -> Callable[..., Any]:
    """A wrong helper, which calls the right one with a changed argument.

    name: of the argument. wrong: changes its value.
    """

    def called(right: Any, *given: Any) -> Any:
        function = getattr(right, "fn", right)  # fn: of one that is jitted
        call = inspect.signature(function).bind(*given)
        call.arguments[name] = wrong(call.arguments[name])
        return right(*call.args)

    return called


def result(wrong: Callable[[Any], Any]) -> Callable[..., Any]:
    """A wrong helper, which returns wrong(value) where the right one returns `value`."""
    return lambda right, *given: wrong(right(*given))
