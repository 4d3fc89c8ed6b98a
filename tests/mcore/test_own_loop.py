"""A script that trains without `pretrain` is stopped before its first step if a flag does nothing.

The models are built by Megatron's builder, as in such a script, and no plugin attaches to them
unless a test says so.
"""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.optim import optimizer

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.loop.idle_flags import IdleFlags
from megatron_fp4.mcore.loop.plugin import Plugin
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear
from megatron_fp4.recipes import get_recipe
from testing.builders import attached
from testing.builders.launch_arguments import launch_arguments
from testing.builders.small_gpt import losses_and_gradients
from testing.worlds.own_megatron import run
from tests.mcore.test_own_megatron import SIZES, TETRAJET, error_of

UNFOLLOWED = "^no linear follows recipe tetrajet: the script trains in a loop of its own; build the"
UNSENT = "^--fp4-grad-comm did nothing: the script made no optimizer by the"


@pytest.fixture(autouse=True)
def on_a_cpu(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # of Megatron's embedding
    monkeypatch.setattr(optimizer, "_global_optimizer_pre_hooks", OrderedDict())


def plugin(recipe: str | None = None, grad_comm: str | None = None) -> Plugin:
    own = Plugin(ours=False)
    own.args = launch_arguments(fp4_grad_comm=grad_comm, fp4_rotates=False, rank=0)
    own.run = attached.run(get_recipe(recipe)) if recipe else None
    own._idle.begin(own.args, None if own.run is None else own.run.recipe)
    return own


def build(own: Plugin, monkeypatch: pytest.MonkeyPatch) -> MegatronModule:
    with monkeypatch.context() as patch:
        patch.setattr(TransformerBlock, "__init__", own.building_block(TransformerBlock.__init__))
        return attached.model(num_layers=1, hidden_dropout=0.0, attention_dropout=0.0)


def step() -> float:
    """A step of a model without Megatron's block of layers; returns the weight after it."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    adam = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
    model(torch.ones(1, 1)).sum().backward()
    adam.step()
    return model.weight.item()


def hooks(model: MegatronModule) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("flags", "refusal"), [({"recipe": "tetrajet"}, UNFOLLOWED), ({"grad_comm": "fp8"}, UNSENT)]
)
def test_a_loop_of_its_own_is_refused_at_its_first_pass(
    flags: dict[str, str], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(plugin(**flags), monkeypatch)
    for _ in range(2):  # a script that catches the error is not let through
        with pytest.raises(ConfigError, match=refusal):
            losses_and_gradients(model)
    # Negative control: without the check it trains, and no linear follows a recipe.
    monkeypatch.setattr(IdleFlags, "check_first_pass", lambda self, block: None)
    unchecked = build(plugin(**flags), monkeypatch)
    assert len(losses_and_gradients(unchecked)) > 1
    linears = [each for each in unchecked.modules() if isinstance(each, Fp4ColumnParallelLinear)]
    assert linears and not any(each.follows() for each in linears)


def test_evaluations_and_passes_without_gradients_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(plugin("tetrajet"), monkeypatch)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        training = model(tokens, tokens, None)
    assert torch.equal(model.eval()(tokens, tokens, None), training)
    with pytest.raises(ConfigError, match=UNFOLLOWED):  # Negative control.
        model.train()(tokens, tokens, None)


def test_a_model_that_was_built_before_recipes_are_attached_trains_without_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = plugin("tetrajet")
    model = build(own, monkeypatch)
    assert hooks(model) == 1
    monkeypatch.setattr("megatron_fp4.mcore.loop.plugin.attach", lambda *given: None)
    own._attach([model])
    losses_and_gradients(model)
    assert hooks(model) == 0  # nothing is called in later passes


def test_gradients_that_are_sent_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    own = plugin(grad_comm="fp8")
    model = build(own, monkeypatch)
    own._idle.send()  # as the optimizer of pretrain does
    losses_and_gradients(model)
    assert hooks(model) == 0


def test_without_a_flag_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(plugin(), monkeypatch)
    assert hooks(model) == 0
    losses_and_gradients(model)
    assert step() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("flags", "refusal"), [({"recipe": "tetrajet"}, UNFOLLOWED), ({"grad_comm": "fp8"}, UNSENT)]
)
def test_a_model_without_the_block_is_refused_before_the_first_step_of_its_optimizer(
    flags: dict[str, str], refusal: str
) -> None:
    own = plugin(**flags)
    for _ in range(2):  # a script that catches the error is not let through
        with pytest.raises(ConfigError, match=refusal):
            step()
    # Negative control: what pretrain does to a model and its optimizer removes the check.
    own._idle.follow()
    own._idle.send()
    assert step() == pytest.approx(0.5)
    assert not optimizer._global_optimizer_pre_hooks  # nothing is called in later steps


def test_a_second_parse_adds_no_check() -> None:
    own = plugin("tetrajet")
    assert own.args is not None and own.run is not None
    own._idle.begin(own.args, own.run.recipe)
    assert len(optimizer._global_optimizer_pre_hooks) == 1


def test_a_recipe_and_gradients_are_both_awaited() -> None:
    own = plugin("tetrajet", grad_comm="fp8")
    own._idle.follow()
    with pytest.raises(ConfigError, match=UNSENT):
        step()


def test_a_launch_is_stopped_before_a_step() -> None:
    refused = run("own_loop.py", 1, *TETRAJET)
    assert "the script trains in a loop of its own" in error_of(refused)
    assert "own step" not in refused.output


@pytest.mark.slow
def test_a_launch_without_a_recipe_has_its_loop() -> None:
    plain = run("own_loop.py", 1, *SIZES)
    assert plain.status == 0 and plain.output.count("own step") == 4, plain.output[-4000:]


@pytest.mark.slow
def test_a_launch_without_the_block_is_stopped_before_a_step(tmp_path: Path) -> None:
    script = tmp_path / "plain_model.py"
    script.write_text("""
import torch
from megatron.training.arguments import parse_and_validate_args
parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("own step", flush=True)
""")
    refused = run(script, 1, *TETRAJET)
    assert "the script trains in a loop of its own" in error_of(refused)
    assert "own step" not in refused.output
    plain = run(script, 1, *SIZES)  # Negative control.
    assert plain.status == 0 and "own step" in plain.output, plain.output[-4000:]
