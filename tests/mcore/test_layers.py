"""What a linear does over a step: W's operands, repeated calls, experts' tokens, and other recipes
for some modules; and that none of it changes a bit where it should not."""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer, get_recipe
from megatron_fp4.arithmetic.philox import Key, Placement, random_bits16
from megatron_fp4.execution import backward, forward, making
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.mcore.model.layers import Fp4State
from megatron_fp4.mcore.model.run import Counters, Run
from megatron_fp4.mcore.model.shards import column_parallel_placements, row_parallel_placements
from megatron_fp4.recipe import GemmRecipe, Recipe
from testing.worlds.launch import OVERLAP, train
from tests.mcore.test_run import BATCH, MICROBATCHES, SEQUENCE, run_of

SIZE = 32
Y = dict[int, list[Tensor]]  # outputs of each step's microbatches


@pytest.fixture(autouse=True)
def microbatches() -> Any:
    calculator.init_num_microbatches_calculator(0, None, MICROBATCHES * BATCH, BATCH, 1)
    yield
    calculator.destroy_num_microbatches_calculator()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operand was made."""
    counts: Counter[str] = Counter()
    make = making.make_operands

    def counting(makings: Any, matrices: Any, folds: Any, site: Any, call: Any) -> Any:
        operands = [operand for one in makings for operand in one.operands]
        counts.update(site.label(operand, call) for operand in operands)
        return make(makings, matrices, folds, site, call)

    for module in (forward, backward):
        monkeypatch.setattr(module, "make_operands", counting)
    return counts


def state(run: Run, name: str = "layer", **fields: Any) -> Fp4State:
    whole = {operand: Placement() for operand in ("x", "w", "dy")}
    return Fp4State(run, run.recipe, run.site(name, whole, None), **fields)


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)))


def activation(seed: int = 2, tokens: tuple[int, ...] = (SEQUENCE, BATCH)) -> Tensor:
    return torch.randn(*tokens, SIZE, generator=torch.Generator().manual_seed(seed))


def step(run: Run, layer: Fp4State, w: Tensor, training: bool = True) -> Tensor:
    """One forward and backward pass of each microbatch; the outputs."""
    outputs = []

    def forward(data: Any, model: Any) -> None:
        x = activation().requires_grad_()
        outputs.append(layer.product(x, w, None, training))
        if training:
            outputs[-1].square().sum().backward()

    for _ in range(MICROBATCHES):
        model = types.SimpleNamespace(vp_stage=None, training=training)
        run.counting(forward)(iter(()), model)
    return torch.stack(outputs).detach()


def test_a_loop_that_counts_no_steps_is_refused(one_rank: None) -> None:
    """All its steps would draw the bits of the first, and multiply its weights."""
    run = run_of(curr_iteration=0)
    layer, w = state(run), weight()
    run.awaits_steps = True  # as the plugin sets it
    layer.product(activation(), w, None, False)  # evaluates
    with pytest.raises(ConfigError, match="trains in a loop of its own: train by pretrain"):
        layer.product(activation(), w, None, True)
    step(run, layer, w)  # counted
    assert not run.awaits_steps


def test_microbatches_round_as_one_of_all_their_sequences(one_rank: None) -> None:
    """Each token draws the bits of its row in the global batch, in both passes."""
    whole, dy = activation(5, (SEQUENCE, MICROBATCHES * BATCH)), activation(6)

    def results(size: int) -> tuple[Tensor, Tensor]:
        calculator.destroy_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, MICROBATCHES * BATCH, size, 1)
        run = run_of(curr_iteration=0)
        layer, w = state(run), weight()
        found: list[tuple[Tensor, Tensor]] = []

        def forward(data: Any, model: Any) -> None:
            x = whole[:, len(found) * size :][:, :size].clone().requires_grad_()
            y = layer.product(x, w, None, True)
            y.backward(dy[:, :1].expand_as(y))
            assert x.grad is not None
            found.append((y.detach(), x.grad))

        for _ in range(MICROBATCHES * BATCH // size):
            run.counting(forward)(iter(()), types.SimpleNamespace(vp_stage=None))
        y, dx = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
        return y, dx

    together = results(MICROBATCHES * BATCH)
    apart = results(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert not torch.equal(apart[1][:, 0], apart[1][:, BATCH])  # the same dY, other bits


@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_draws_the_bits_of_its_part_of_the_whole(ranks: int, ranges: int) -> None:
    """Of W [64, 16] and dY [3, 64] of a column-parallel linear, in each of the ranges a part; and
    of W [16, 64] and X [3, 64] of a row-parallel one."""
    key, length, cpu = Key(3, 5), 64 // (ranks * ranges), torch.device("cpu")
    tall, wide, tokens = (random_bits16(*s, key, 7) for s in ((64, 16), (16, 64), (3, 64)))
    for rank in range(ranks):
        own = torch.arange(64).view(ranges, ranks, length)[:, rank].flatten()
        place = column_parallel_placements(rank, ranks, length, ranges, cpu)
        part = random_bits16(len(own), 16, key, 7, place["w"])
        assert torch.equal(part, tall[own])
        assert torch.equal(random_bits16(3, len(own), key, 7, place["dy"]), tokens[:, own])
        own = torch.arange(64).view(ranks, -1)[rank]
        place = row_parallel_placements(rank, ranks, len(own), cpu)
        assert torch.equal(random_bits16(16, len(own), key, 7, place["w"]), wide[:, own])
        assert torch.equal(random_bits16(3, len(own), key, 7, place["x"]), tokens[:, own])


# --- W's operands ------------------------------------------------------------------------------


def test_w_is_prepared_once_a_step(one_rank: None, made: Counter[str]) -> None:
    run = run_of(curr_iteration=0)
    layer, w = state(run), weight()
    for iteration in (0, 1):
        run.args.curr_iteration = iteration
        step(run, layer, w)
    assert made["layer:fprop:w"] == made["layer:dgrad:w"] == 2
    assert made["layer:fprop:x"] == 2 * MICROBATCHES
    run = run_of(curr_iteration=0, fp4_weight_cache="off")
    step(run, state(run), w)
    assert made["layer:fprop:w"] == 2 + MICROBATCHES


def changed(how: str, run: Run, w: torch.nn.Parameter) -> None:
    """The weight is other than it was when its operands were made."""
    if how == "optimizer step":  # writes past the version counter, as Megatron's do
        w.data.mul_(3)
        run.args.curr_iteration += 1
    elif how == "calibration step":  # whose number no argument of Megatron's has
        w.data.mul_(3)
        run.calibrate(1)
    elif how == "evaluation after an update":  # of the step that the update ended
        w.data.mul_(3)
    elif how == "checkpoint load":
        module = torch.nn.Module()
        module.weight = w
        module.load_state_dict({"weight": 3 * w.detach()})


CHANGES = ["optimizer step", "calibration step", "evaluation after an update", "checkpoint load"]


@pytest.mark.parametrize("how", CHANGES)
def test_no_stale_weight_is_multiplied(one_rank: None, how: str) -> None:
    run = run_of(get_recipe("mxfp4"), curr_iteration=0)
    layer, w = state(run), weight()
    before = step(run, layer, w)
    changed(how, run, w)
    after = step(run, layer, w, training=how != "evaluation after an update")
    # Not a power of two, so codes change; the forward pass of mxfp4 draws nothing.
    fresh = run_of(get_recipe("mxfp4"), curr_iteration=0)
    assert torch.equal(after, step(fresh, state(fresh), w)) and not torch.equal(after, before)


def test_an_evaluation_of_averaged_weights_follows_one_of_the_trained(one_rank: None) -> None:
    """Written past the version counter, with no step between."""
    run = run_of(get_recipe("mxfp4"), curr_iteration=0)
    layer, w = state(run), weight()
    step(run, layer, w)
    trained = step(run, layer, w, training=False)
    w.data.mul_(3)
    averaged = step(run, layer, w, training=False)
    fresh = run_of(get_recipe("mxfp4"), curr_iteration=0)
    assert torch.equal(averaged, step(fresh, state(fresh), w)) and not torch.equal(
        averaged, trained
    )


def test_an_evaluation_keeps_the_mean_of_x(one_rank: None) -> None:
    """Later tokens have a part in the mean, which an evaluation must not see."""
    kept = get_recipe("mxfp4")

    def outputs(recipe: Recipe, training: bool) -> Tensor:
        run = run_of(recipe, curr_iteration=0)
        return step(run, state(run), weight(), training)

    subtracted = replace(kept, x_mean="subtracted")
    assert torch.equal(outputs(subtracted, training=False), outputs(kept, training=False))
    assert not torch.equal(outputs(subtracted, training=True), outputs(kept, training=True))


@pytest.mark.parametrize("how", ["optimizer step", "checkpoint load"])
def test_a_cache_that_is_never_stale_would_be_caught(
    one_rank: None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: operands kept whatever happens to W."""
    run = run_of(get_recipe("mxfp4"), curr_iteration=0)
    layer, w = state(run), weight()
    held = HeldWeight()
    monkeypatch.setattr(layer.cache, "at", lambda stamp: held)
    before = step(run, layer, w)
    changed(how, run, w)
    assert torch.equal(step(run, layer, w), before)


FORMS = "packed", "decoded", "fprop", "off", "remade"


@pytest.mark.parametrize("recipe", ["tetrajet", pytest.param("dge-occ", marks=pytest.mark.slow)])
def test_how_the_weights_are_kept_changes_no_bit(recipe: str) -> None:
    """Through the real loop; gradients reach the losses of the later steps."""
    flags = ("--bf16", "--fp4-recipe", recipe, "--fp4-weight-cache")
    losses = [train(1, *flags, form).losses for form in FORMS]
    assert all(each == losses[0] for each in losses) and len(losses[0]) == 4


# --- repeated calls ----------------------------------------------------------------------------


def outputs_of_two_calls(run: Run, layer: Fp4State, w: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    run.counting(
        lambda data, model: found.extend(
            layer.product(activation(), w, None, True).detach() for _ in range(2)
        )
    )(iter(()), types.SimpleNamespace(vp_stage=None))
    return found


def test_a_layer_called_twice_in_a_microbatch_draws_twice(one_rank: None) -> None:
    """As a repeated layer of multi-token prediction is; a step that is run again draws the same."""
    run = run_of(curr_iteration=0)
    layer, w = state(run), weight()
    first, second = outputs_of_two_calls(run, layer, w)
    assert not torch.equal(first, second)
    for _ in range(MICROBATCHES - 1):
        outputs_of_two_calls(run, layer, w)
    again = outputs_of_two_calls(run, layer, w)
    assert torch.equal(again[0], first) and torch.equal(again[1], second)


# --- experts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("recipe", ["tetrajet", "mxfp4", "dge-occ", "square"])
def test_an_expert_takes_any_number_of_tokens(one_rank: None, recipe: str, tokens: int) -> None:
    """Rows of zeros fill its last block: the results are those of the tokens and the zeros."""
    square = Quantizer(block=(16, 32))  # rows of tokens too, in fprop alone
    plain = Recipe("square", fprop=GemmRecipe(square, square))
    chosen = plain if recipe == "square" else get_recipe(recipe)
    run = run_of(chosen, curr_iteration=0, micro_batch_size=BATCH, seq_length=SEQUENCE)
    results = []
    x = activation(tokens=(tokens,))
    tile = {"square": 16}.get(recipe, 32)
    filled = torch.cat((x, torch.zeros(-tokens % tile, SIZE)))
    for given in (x, filled):
        layer, w = state(run, is_expert=True), weight()
        leaf = given.clone().requires_grad_()
        y = layer.product(leaf, w, None, True)
        dy = torch.zeros(len(given), SIZE)
        dy[:tokens] = activation(3, (tokens,))
        y.backward(dy)
        assert leaf.grad is not None and w.grad is not None and len(y) == len(given)
        results.append((y[:tokens], leaf.grad[:tokens], w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("ranks", "tensor_ranks"), [(4, 1), (2, 2)])
def test_copies_and_microbatches_of_an_expert_share_no_row(
    ranks: int, tensor_ranks: int, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight data-parallel ranks, four of which share the experts: two copies of each."""
    sizes = {
        "data_parallel": 8,
        "expert_model_parallel": ranks,
        "expert_tensor_parallel": tensor_ranks,
        "expert_data_parallel": 2,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(parallel_state, f"get_{name}_world_size", lambda size=size: size)
    length = 1024  # so long that the room for padding has none for another rank's tokens
    run = run_of(micro_batch_size=BATCH, seq_length=length)
    # Every token of the ranks that send to an expert, and rows that fill a block of 1,024.
    most = BATCH * length * 4 + 1023
    rows = []
    for copy in range(2):
        monkeypatch.setattr(parallel_state, "get_expert_data_parallel_rank", lambda c=copy: c)
        for local in range(MICROBATCHES):
            counters = Counters(0, local * 8 + copy * 4 + 3)
            rows.append(run.expert_rows(counters, most, torch.device("cpu"))[1])
    assert torch.cat(rows).unique().numel() == len(rows) * most


EXPERTS = """
    --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --bf16
    --moe-token-dispatcher-type allgather --moe-shared-expert-intermediate-size 64
    --fp4-recipe tetrajet
""".split()
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_experts_on_two_ranks_learn_and_recompute_their_own_bits() -> None:
    plain = train(2, *EXPERTS)
    assert plain.losses[-1] < plain.losses[0]
    assert "mlp.experts.local_experts.0-3.linear_fc1" in plain.output  # of both ranks
    assert "mlp.shared_experts.linear_fc2" in plain.output
    assert train(2, *EXPERTS, *RECOMPUTE.split()).losses == plain.losses


# --- main_grad ---------------------------------------------------------------------------------


def test_adding_to_main_grad_under_overlap_is_adding_without(tmp_path: Any) -> None:
    """Two data-parallel ranks, two microbatches each, small buckets, clipping: the losses are those
    of the plain optimizer; and rounding dW first gives others."""
    flags = ("--bf16", "--fp4-recipe", "tetrajet", "--global-batch-size", "8", "--clip-grad", ".1")
    plain = train(2, *flags).losses
    assert train(2, *flags, *OVERLAP, "--ddp-bucket-size", "20000").losses == plain
    rounded = train(2, *flags, "--no-gradient-accumulation-fusion").losses
    assert rounded != plain and rounded == pytest.approx(plain, rel=1e-2)


def test_a_growing_batch_learns() -> None:
    """From one microbatch a step to two, after two steps of two samples of 64 tokens."""
    flags = ("--step-batch-size-schedule", "0:2 256:4", "--bf16", "--fp4-recipe", "tetrajet")
    result = train(1, *flags, "--train-iters", "6")
    sizes = [line.split("global batch size:")[1].split()[0] for line in result.output.splitlines()
             if "global batch size:" in line]  # fmt: skip
    assert sizes == ["2"] * 2 + ["4"] * 4 and result.losses[-1] < result.losses[0]


def test_a_repeated_mtp_layer_learns() -> None:
    flags = ("--mtp-num-layers", "2", "--mtp-use-repeated-layer", "--bf16", "--fp4-recipe")
    losses = train(1, *flags, "tetrajet").losses
    assert losses[-1] < losses[0]
