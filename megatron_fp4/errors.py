"""ConfigError, which reports a mistake of the user, and checks that raise it."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A mistake in what the user asked for: one line that says what is wrong and what to do."""


class SizeError(ConfigError):
    """A size of a linear that a recipe's blocks do not divide.

    where: the linear's name.
    axis: what `size` counts: "tokens", "in_features" or "out_features".
    multiple: what `size` has to be a multiple of.
    reason: which GEMM of which recipe needs that, as a relative clause.
    is_backward: whether that GEMM is one of the backward pass.

    The message names the arguments of `linear` and `Linear`. A caller whose users set sizes by
    other names (Megatron's flags) builds its own message from the fields.
    """

    def __init__(
        self,
        where: str,
        axis: str,
        size: int,
        multiple: int,
        reason: str,
        is_backward: bool = False,
    ) -> None:
        self.where, self.axis, self.size, self.multiple = where, axis, size, multiple
        self.reason, self.is_backward = reason, is_backward
        counted, remedy = f"{axis} is {size}", f"choose a multiple of {multiple}"
        if axis == "tokens":
            counted = f"x has {size} tokens (the product of all its dimensions but the last)"
            if is_backward:
                remedy += ", or call it under torch.no_grad() where no gradient is needed"
        super().__init__(f"{where}: {counted}, not a multiple of {multiple}, {reason}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled with its message, which is no argument of this class.
        fields = (self.where, self.axis, self.size, self.multiple, self.reason, self.is_backward)
        return SizeError, fields


def check_choices(data: Any) -> None:
    """Check that each field of a dataclass that is declared as a Literal has one of its values.

    Raises ConfigError otherwise. Without this check a misspelt word would act as some other value.
    """
    for name, hint in get_type_hints(type(data)).items():
        value = getattr(data, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            known = " or ".join(map(str, get_args(hint)))
            raise ConfigError(f"{name} is {known}, not {value!r}")
