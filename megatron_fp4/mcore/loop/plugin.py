"""The plugin in Megatron's functions: any script that calls Megatron's `pretrain` follows it.

`install` replaces functions of megatron.core and megatron.training before the script imports them.
From then on

    parse_and_validate_args   knows the plugin's flags, checks them, and makes the Run
    validate_args             checks arguments that came from a checkpoint too, and settles those
                              that the script has parsed by itself
    TransformerBlock          builds this package's linears in place of those of its specification,
                              and modules that can be given fused kernels
    pretrain, get_model       attach recipes to the linears of the model that was built, and fused
                              kernels, before it is wrapped, and count the script's forward steps
    get_megatron_optimizer    makes data-parallel ranks exchange gradients in few bits and gather
                              weights as codes, and an optimizer that keeps the state beside
                              weights, and that has fused kernels
    load_checkpoint           starts the state that the checkpoint lacks

A launch without a recipe runs as it would without the plugin; --fp4-metrics-interval adds a file
with the steps of its log, --fp4-fused-kernels liger adds fused kernels, and --fp4-grad-comm sends
gradients in few bits. pretrain_gpt.py (loop/gpt.py) is such a script too. C stands for
megatron/core, T for megatron/training.
"""

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

import megatron.training as package
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import arguments, training

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.checkpoints.weight_states import CheckpointedStates
from megatron_fp4.mcore.data import vocabulary
from megatron_fp4.mcore.exchange import start
from megatron_fp4.mcore.launch import command_line, cuda_graphs, fp4_arguments
from megatron_fp4.mcore.launch import fused_kernels as launched_kernels
from megatron_fp4.mcore.launch.command_line import Script
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.launch.refusals.table import of_launch, refuse
from megatron_fp4.mcore.loop import (
    compat,
    log,
    metrics,
    optimizer_setup,
    phased_graphs,
    ramping,
)
from megatron_fp4.mcore.loop.idle_flags import IdleFlags
from megatron_fp4.mcore.loop.metrics_log import MetricsLog, WithoutRecipe
from megatron_fp4.mcore.model import fused_kernels
from megatron_fp4.mcore.model.attach import attach
from megatron_fp4.mcore.model.replacement import followed, fusable
from megatron_fp4.mcore.model.run import Run


class Plugin:
    """What the plugin knows of this process's launch.

    ours: whether the script is pretrain_gpt.py and not a user's own.
    args: Megatron's arguments; None before they are parsed.
    run: the FP4 run; None without a recipe.
    metrics: what collects the metrics of the linears; None where nothing does.
    """

    def __init__(self, ours: bool) -> None:
        self.ours = ours
        self.args: argparse.Namespace | None = None
        self.run: Run | None = None
        self.metrics: metrics.Metrics | None = None
        self._idle = IdleFlags()
        self._checkpointed: CheckpointedStates | None = None

    def check_followed(self) -> None:
        """Raises ConfigError if no model was built whose linears follow the recipe.

        Call it when the script has ended.
        """
        if self.args is None:
            raise ConfigError(
                "the script parsed no arguments of Megatron's: call megatron.training.arguments' "
                "parse_and_validate_args and megatron.training's pretrain in it"
            )
        self._idle.refuse("the script trained no model")

    # --- the command line -------------------------------------------------------------------------

    def parse(
        self,
        extra_args_provider: Any = None,
        ignore_unknown_args: bool = False,
        args_defaults: Any = None,
    ) -> argparse.Namespace:
        """Replaces T/arguments.py:parse_and_validate_args, with the same arguments and result."""
        script = Script(self.ours, extra_args_provider, args_defaults or {}, ignore_unknown_args)
        self._begin(command_line.parse(script))
        assert self.args is not None
        return self.args

    def _begin(self, args: argparse.Namespace) -> None:
        self.args = args
        with megatrons_demands():
            recipe = fp4_arguments.recipe_of(args)
        line = log.precision(args) if recipe is None else ""
        if recipe is not None:
            self.run = Run(recipe, args, fp4_arguments.module_recipes(args))
            if self.run.ramping is not None:
                args.fp4_fused_adamw = False  # Q-Ramping has an AdamW of its own
        self._idle.begin(args, recipe)
        if self.ours or self.run is not None:
            log.install()
        if every := metrics.interval(args):
            self._measure(args, every, line)
        if self.run is not None and self.run.ramping is not None:
            ramping.Calibrations(self.run, self.run.ramping).install()
        lines = [each for each in (line, metrics.announcement(args, self.run is not None)) if each]
        if lines and args.rank == 0:
            print(*lines, sep="\n", flush=True)

    def _measure(self, args: argparse.Namespace, every: int, line: str) -> None:
        """Makes the launch write metrics.jsonl from now on.

        With a recipe the file has the metrics of linears and what Megatron's log says of steps and
        evaluations, without one the latter alone. every: the number of steps from one report to the
        next. line: what a launch without a recipe prints at its start, which the file has too.
        """
        if self.run is None:
            log_alone = MetricsLog(WithoutRecipe(args, line))
            training.print_rank_last = log_alone.following(training.print_rank_last)
        else:
            self.metrics = metrics.Metrics(self.run, every)
            self.metrics.install()

    def validating(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """T/arguments.py:validate_args, which checks the launch first, with --use-checkpoint-args.

        parse_and_validate_args calls it after it has read the arguments of the checkpoint. Only
        then are all arguments known.
        """

        @functools.wraps(upstream)
        def validate_args(args: argparse.Namespace, defaults: Any = None) -> Any:
            script = Script(self.ours, defaults=defaults or {})
            was_unsettled = command_line.settle_unsettled(args, script)
            is_checked = script.is_checked(args)
            if args.use_checkpoint_args:  # which may name another activation or normalization
                launched_kernels.settle(args, is_checked)
            if is_checked:
                vocabulary.install()  # Megatron pads the vocabulary right after this function
                if args.use_checkpoint_args:
                    refuse(of_launch(script.settled(args), self.ours))
            validated = upstream(args, defaults or {})
            if was_unsettled:
                self._begin(validated)
            return validated

        return validate_args

    # --- the model --------------------------------------------------------------------------------

    def building_block(self, upstream: Callable[..., None]) -> Callable[..., None]:
        """A constructor of Megatron's block of layers, which calls upstream's with a changed
        specification: with this package's linears where the launch has a recipe, and with fused
        kernels around them where it uses these."""

        @functools.wraps(upstream)
        def build(block: Any, config: Any, spec: Any, *others: Any, **named: Any) -> None:
            if self.run is not None:
                spec = followed(spec)
            if self.args is not None and self.args.fp4_rotates:
                spec = fusable(spec)
            upstream(block, config, spec, *others, **named)
            self._idle.check_first_pass(block)

        return build

    def _hook_into(self, config: Any) -> None:
        """Has `_attach` called for the model that `config` describes.

        T/training.py:setup_model_and_optimizer builds config.model, or calls get_model.
        """
        args = self._ensure_begun()
        model = getattr(config, "model", None)
        if model is not None:
            if args.use_cpu_initialization and not args.use_torch_fsdp2:
                model.pre_wrap_hooks.append(compat.to_gpu)
            model.pre_wrap_hooks.append(self._attach)

    def _ensure_begun(self) -> argparse.Namespace:
        """Begins the launch if it has not begun: a script without a recipe may have parsed its
        arguments by itself. Returns them."""
        if self.args is None:
            args = training.get_args()
            command_line.settle_unsettled(args, Script(self.ours))
            self._begin(args)
        assert self.args is not None
        return self.args

    def _attach(self, model: list[MegatronModule]) -> list[MegatronModule]:
        assert self.args is not None
        fuse = functools.partial(fused_kernels.attach, self.args, model)
        if self.run is None:
            if self._may_fuse() and (kernels := fuse()) and self.args.rank == 0:
                print(f"megatron-fp4: {kernels}", flush=True)
        else:
            attach(self.run, model, fuse)
            if cuda_graphs.wanted(self.args):
                phased_graphs.install(self.run, model)
            self._idle.follow()
            self.run.awaits_steps = True
            if self.metrics is not None:
                self.metrics.follow_model(model)
        return model

    def getting_model(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """T/training.py:get_model, which attaches recipes to the model before it is wrapped.

        It calls the script's model provider once for each chunk, and wraps the chunks right after
        that.
        """

        @functools.wraps(upstream)
        def get_model(model_provider_func: Any, *others: Any, **named: Any) -> Any:
            self._ensure_begun()
            if self.run is None and not self._may_fuse():
                return upstream(model_provider_func, *others, **named)
            built: list[MegatronModule] = []

            @functools.wraps(model_provider_func)
            def provide(*given: Any, **options: Any) -> Any:
                found = model_provider_func(*given, **options)
                built.extend(found if isinstance(found, list) else [found])
                if len(built) >= self._chunks():
                    self._attach(compat.to_gpu(built))
                return found

            return upstream(provide, *others, **named)

        return get_model

    def _may_fuse(self) -> bool:
        """Whether kernels may be fused, and the start says which: always with a recipe."""
        assert self.args is not None
        return self.ours or self.run is not None or self.args.fp4_rotates

    def _chunks(self) -> int:
        """The number of model chunks on this rank."""
        stages = getattr(self.args, "virtual_pipeline_model_parallel_size", None)
        return stages or 1 if mpu.get_pipeline_model_parallel_world_size() > 1 else 1

    # --- the training -----------------------------------------------------------------------------

    def pretraining(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """T/training.py:pretrain, which counts the script's forward steps, and reports at its end
        what was not reported yet."""
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        def pretrain(*given: Any, **named: Any) -> Any:
            call = signature.bind(*given, **named)
            self._hook_into(call.arguments["cfg_container"])
            if self.run is None:
                return upstream(*call.args, **call.kwargs)
            step = call.arguments["forward_step_func"]
            call.arguments["forward_step_func"] = self._counting(self.run, step)
            try:
                return upstream(*call.args, **call.kwargs)
            finally:
                self.run.report()

        return pretrain

    def _counting(self, run: Run, step: Callable[..., Any]) -> Callable[..., Any]:
        counted = run.counting(step)

        @functools.wraps(step)
        def forward_step(*given: Any, **named: Any) -> Any:
            self._idle.refuse_unfollowed("its builder attached no recipe to the model")
            return counted(*given, **named)

        return forward_step

    def making_optimizer(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """get_megatron_optimizer, whose optimizer keeps and sends what the flags ask for."""
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        def get_megatron_optimizer(*given: Any, **named: Any) -> Any:
            if self.args is None:
                return upstream(*given, **named)
            chunks = signature.bind(*given, **named).arguments["model_chunks"]
            if self.args.fp4_grad_comm is not None:
                self._exchange_gradients(chunks)
            optimizer = upstream(*given, **named)
            optimizer_setup.set_up(optimizer, chunks, self.args, self.run)
            if self.run is not None and self.run.kept:
                self._checkpointed = CheckpointedStates(optimizer, self.run)
            if self.metrics is not None:
                self.metrics.follow_optimizer(optimizer)
            return optimizer

        return get_megatron_optimizer

    def _exchange_gradients(self, chunks: list[MegatronModule]) -> None:
        assert self.args is not None
        line = start.begin(self.args, self.run, chunks)
        self._idle.send()
        if self.args.rank == 0:
            print(line, flush=True)

    def loading(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """T/checkpointing.py:load_checkpoint, which then starts the state that it did not load."""

        @functools.wraps(upstream)
        def load_checkpoint(*given: Any, **named: Any) -> Any:
            loaded = upstream(*given, **named)
            if self.run is not None:
                self.run.sent_weights.expire()
                self.run.weight_states.expire()
            if self._checkpointed is not None:
                self._checkpointed.complete()
            return loaded

        return load_checkpoint


_installed: Plugin | None = None


def install(ours: bool) -> Plugin:
    """Puts the plugin into Megatron's functions; returns it. Call it before the script is imported.

    ours: whether the script is pretrain_gpt.py. Idempotent: a second call changes `ours` alone.
    """
    global _installed
    if _installed is not None:
        _installed.ours = ours
        return _installed
    plugin = _installed = Plugin(ours)
    compat.install()
    arguments.parse_and_validate_args = plugin.parse
    arguments.validate_args = plugin.validating(arguments.validate_args)
    training.get_megatron_optimizer = plugin.making_optimizer(training.get_megatron_optimizer)
    training.load_checkpoint = plugin.loading(training.load_checkpoint)
    for module in (training, package):
        module.pretrain = plugin.pretraining(module.pretrain)  # type: ignore[attr-defined]
        module.get_model = plugin.getting_model(module.get_model)  # type: ignore[attr-defined]
    for block in (TransformerBlock, MultiTokenPredictionBlock):
        block.__init__ = plugin.building_block(block.__init__)
    return plugin
