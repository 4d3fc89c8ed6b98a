"""Refuses a training in which a recipe or --fp4-grad-comm does nothing.

Megatron's `pretrain` and `get_model` reach the plugin before the first step. A script with a loop
of its own may call neither. Such a script is stopped in the first forward pass of Megatron's block
of layers, and without such a block before the first step of its optimizer.
"""

import argparse
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments.steps import trains
from megatron_fp4.recipe import Recipe

_OWN_LOOP = "the script trains in a loop of its own"
_UNFOLLOWED = (
    "no linear follows recipe {recipe}: {what}; build the model by Megatron's GPTModel or another "
    "model of its TransformerBlock, and train it by megatron.training's pretrain"
)


class IdleFlags:
    """Whether a launch's recipe and --fp4-grad-comm have done nothing yet.

    `what` is what the script does instead, in words, for the message.
    """

    def __init__(self) -> None:
        self._args: argparse.Namespace | None = None
        self._unfollowed: Recipe | None = None
        self._is_followed = False
        self._is_sending = False
        self._hook: RemovableHandle | None = None

    def begin(self, args: argparse.Namespace, recipe: Recipe | None) -> None:
        """Call it when the arguments are parsed. recipe: None without one.

        From then on a step of any torch optimizer raises ConfigError while a flag does nothing.
        """
        self._args, self._unfollowed = args, None if self._is_followed else recipe
        if self._hook is None and self._are_idle:
            self._hook = register_optimizer_step_pre_hook(lambda *given: self.refuse(_OWN_LOOP))

    def follow(self) -> None:
        """Call it when linears follow the recipe."""
        self._unfollowed, self._is_followed = None, True
        self._drop_hook()

    def send(self) -> None:
        """Call it when gradients are sent as --fp4-grad-comm says."""
        self._is_sending = True
        self._drop_hook()

    def refuse(self, what: str) -> None:
        """Raises ConfigError if a flag does nothing in the training."""
        self.refuse_unfollowed(what)
        if self._is_unsent:
            raise ConfigError(
                "--fp4-grad-comm did nothing: the script made no optimizer by the "
                "get_megatron_optimizer of megatron.training.training; train by its pretrain"
            )

    def refuse_unfollowed(self, what: str) -> None:
        """Raises ConfigError if no linear follows the recipe."""
        if self._unfollowed is not None:
            raise ConfigError(_UNFOLLOWED.format(recipe=self._unfollowed.name, what=what))

    def check_first_pass(self, block: torch.nn.Module) -> None:
        """Has the first forward pass of `block` that trains raise ConfigError if a flag does
        nothing.

        Later passes run without the check. Evaluations and passes without gradients go on.
        """
        if not self._are_idle:
            return

        def check(block: torch.nn.Module, given: Any) -> None:
            if block.training and torch.is_grad_enabled():
                self.refuse(_OWN_LOOP)
                hook.remove()

        hook = block.register_forward_pre_hook(check)

    @property
    def _is_unsent(self) -> bool:
        args = self._args
        asks = args is not None and args.fp4_grad_comm is not None and trains(args)
        return asks and not self._is_sending

    @property
    def _are_idle(self) -> bool:
        return self._unfollowed is not None or self._is_unsent

    def _drop_hook(self) -> None:
        # Not in the hook itself, since PyTorch iterates over its hooks while they run.
        if self._hook is not None and not self._are_idle:
            self._hook.remove()
