"""Steps, microbatches and tokens: which random bits a forward pass, its rerun and its recomputation
are given."""

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fp4 import quantize
from megatron_fp4.arithmetic.philox import Key, Placement
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.mcore.model.layers import Fp4State
from megatron_fp4.mcore.model.run import Counters, Run
from megatron_fp4.recipe import GEMMS, GemmRecipe, Phase, Recipe
from megatron_fp4.replay import Replay
from testing.builders.launch_arguments import launch_arguments

SEQUENCE, BATCH, MICROBATCHES = 32, 2, 3
STOCHASTIC = get_quantizer("mxfp4-ceil-sr")
NOISY = GemmRecipe(STOCHASTIC, STOCHASTIC)
# Draws in the forward pass as well: a recomputation with the wrong bits is another function.
EVERYWHERE = Recipe("noisy", fprop=NOISY, dgrad=NOISY, wgrad=NOISY)


@pytest.fixture(autouse=True)
def microbatches() -> Iterator[None]:
    calculator.init_num_microbatches_calculator(0, None, MICROBATCHES * BATCH, BATCH, 1)
    yield
    calculator.destroy_num_microbatches_calculator()


def run_of(recipe: Recipe = EVERYWHERE, **args: Any) -> Run:
    return Run(recipe, launch_arguments(**args))


def counters_of(
    run: Run, chunks: tuple[int | None, ...] = (None,), count: int = MICROBATCHES
) -> list[Counters]:
    """The counters of one pass over the microbatches, chunk after chunk."""
    seen: list[Counters] = []
    step = run.counting(lambda data, model: seen.append(run.now()))
    for _ in range(count):
        for chunk in chunks:
            step(iter(()), types.SimpleNamespace(vp_stage=chunk))
    return seen


# --- counting ----------------------------------------------------------------------------------


def test_ranks_and_microbatches_never_share_a_row(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, rows = 4, []
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        run = run_of()
        for counters in counters_of(run):
            rows.append(run.token_rows(counters, SEQUENCE, BATCH, torch.device("cpu")))
    # All tokens of the global batch, each once.
    everything = torch.arange(ranks * MICROBATCHES * BATCH * SEQUENCE)
    assert torch.equal(torch.cat(rows).sort().values, everything)
    # The dataset deals rank 1 the second micro batch, in Megatron's [sequence, batch] order.
    second = rows[MICROBATCHES].view(SEQUENCE, BATCH)
    assert second[:3].tolist() == [[64, 96], [65, 97], [66, 98]]


def test_a_step_that_upstream_runs_twice_draws_the_same_bits(one_rank: None) -> None:
    run = run_of()
    first = counters_of(run)
    assert first == [Counters(0, microbatch) for microbatch in range(MICROBATCHES)]
    assert counters_of(run) == first
    run.args.curr_iteration = 1
    assert counters_of(run) == [Counters(1, microbatch) for microbatch in range(MICROBATCHES)]


def test_each_model_chunk_counts_its_own_microbatches(one_rank: None) -> None:
    """Interleaved schedules take the chunks in turns."""
    found = [counters.microbatch for counters in counters_of(run_of(), chunks=(0, 1))]
    assert found == [0, 0, 1, 1, 2, 2]


def test_evaluations_do_not_shift_the_next_step(one_rank: None) -> None:
    plain, evaluated = run_of(curr_iteration=4), run_of(curr_iteration=4)
    counters_of(plain)
    counters_of(evaluated)
    counters_of(evaluated, count=2)  # as many as --eval-iters says
    for run in (plain, evaluated):
        run.args.curr_iteration = 5
    assert counters_of(evaluated) == counters_of(plain)


def test_an_evaluation_alone_is_the_one_that_ended_the_training(one_rank: None) -> None:
    trained = run_of(curr_iteration=6)
    counters_of(trained)
    ended = counters_of(trained, count=2)
    assert counters_of(run_of(iteration=7), count=2) == ended  # as after --load with --skip-train
    again = run_of(iteration=7, curr_iteration=0)  # as where all steps were trained before
    assert counters_of(again, count=2) == ended
    assert counters_of(run_of(iteration=0))[0] == Counters(0, 0)


def test_an_evaluation_reads_the_weights_that_the_step_before_it_left(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the number of that step. Once for all of its microbatches, as in training."""
    run, gathered = run_of(curr_iteration=4), list[str]()
    monkeypatch.setattr(run.weight_states, "gather", lambda: gathered.append("averages"))
    monkeypatch.setattr(run.sent_weights, "refresh", lambda codes: gathered.append("codes"))
    step = run.counting(lambda data, model: None)
    epochs = []
    for training in (True, False, True):
        for _ in range(2):
            step(iter(()), types.SimpleNamespace(vp_stage=None, training=training))
            epochs.append(run.epoch)
        assert gathered == ["averages", "codes"]
        gathered.clear()
    assert epochs == [1, 1, 2, 2, 3, 3]


def test_the_key_is_seed_and_step() -> None:
    run = run_of()
    assert run.key(Counters(3, 1)) == run.key(Counters(3, 2)) == Key(2**40 + 7, 3)


def test_each_step_of_a_calibration_has_a_key_of_its_own() -> None:
    """Step k of the calibration before step s draws as step 2^31 + s + k: docs/numerics.md."""
    run = run_of()
    for number in (0, 1, 29):
        run.calibrate(number)
        assert run.key(Counters(40, 1)) == Key(2**40 + 7, 2**31 + 40 + number)
    run.calibrate(None)
    assert run.key(Counters(40, 1)) == Key(2**40 + 7, 40)


def test_a_phase_begins_at_its_share_of_the_iterations() -> None:
    late = (Phase(0.3, EVERYWHERE.without(GEMMS)),)
    run, recipe = run_of(train_iters=10), replace(EVERYWHERE, phases=late)
    quantized = [run.in_force(recipe, Counters(step, 0)).fprop.quantized for step in range(10)]
    assert quantized == [True] * 3 + [False] * 7


def test_a_share_is_of_the_steps_that_the_samples_make() -> None:
    """With --skip-train Megatron does not count them."""
    late = (Phase(0.5, EVERYWHERE.without(GEMMS)),)
    samples: dict[str, Any] = {
        "train_samples": 40,
        "global_batch_size": 4,
        "step_batch_size_schedule": None,
    }
    run, recipe = run_of(train_iters=None, **samples), replace(EVERYWHERE, phases=late)
    quantized = [run.in_force(recipe, Counters(step, 0)).fprop.quantized for step in (4, 5)]
    assert quantized == [True, False]


def two_phases() -> Recipe:
    late = EVERYWHERE.without(("dgrad",)), EVERYWHERE.without(GEMMS)
    return replace(EVERYWHERE, phases=(Phase(0.3, late[0]), Phase(0.55, late[1])))


def test_a_phase_is_told_once_for_equal_recipes(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(two_phases())
    run.module_recipes = [("x", two_phases()), ("y", two_phases())]
    for step in range(10):
        run.args.curr_iteration = step
        counters_of(run)
    told = [line.partition("takes")[2] for line in capsys.readouterr().out.splitlines()]
    name = EVERYWHERE.name
    assert told == [
        f" the place of {name} from step 4 on",
        f" the place of {name} with dgrad in BF16 from step 7 on",
    ]


def test_after_a_resume_the_step_is_told_in_which_a_phase_began(
    one_rank: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_fp4.mcore.model.run_log.once", lambda key: True)  # a new process
    counters_of(run_of(two_phases(), curr_iteration=8))
    assert "from step 7 on" in capsys.readouterr().out


# --- recomputation -----------------------------------------------------------------------------


class Layer:
    """The product that the FP4 layers of a model call, with its activations checkpointed or not."""

    def __init__(self, run: Run, checkpointed: bool) -> None:
        whole = {operand: Placement() for operand in ("x", "w", "dy")}
        self.state = Fp4State(run, run.recipe, run.site("layer", whole, None))
        self.run, self.checkpointed = run, checkpointed
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(32, 32, generator=generator).requires_grad_()

    def forward(self, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + microbatch)
        x = torch.randn(SEQUENCE, BATCH, 32, generator=generator).requires_grad_()
        if self.checkpointed:
            return checkpoint(self.product, x, use_reentrant=True)
        return self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Squared, so that the gradient depends on the output that was recomputed."""
        return self.state.product(x, self.weight, None, training=True).square()


def one_forward_one_backward(layer: Layer) -> Tensor:
    """The gradient after 1F1B as the first of two stages runs it: a forward pass in advance."""
    waiting: list[Tensor] = []
    forward: Callable[..., Any] = layer.run.counting(
        lambda data, model: waiting.append(layer.forward(next(data)))
    )
    data, model = iter(range(MICROBATCHES)), types.SimpleNamespace(vp_stage=None)
    forward(data, model)
    for _ in range(MICROBATCHES - 1):
        forward(data, model)
        waiting.pop(0).sum().backward()
    waiting.pop(0).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


def test_a_recomputation_gets_its_own_microbatch_s_bits(one_rank: None) -> None:
    kept = one_forward_one_backward(Layer(run_of(), checkpointed=False))
    assert torch.equal(one_forward_one_backward(Layer(run_of(), checkpointed=True)), kept)


def test_without_replay_it_would_get_another_s(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = one_forward_one_backward(Layer(run_of(), checkpointed=False))
    monkeypatch.setattr(Replay, "take", lambda self, fresh: fresh())
    assert not torch.equal(one_forward_one_backward(Layer(run_of(), checkpointed=True)), kept)


# --- health ------------------------------------------------------------------------------------


def break_in(run: Run, step: int, value: float) -> None:
    run.args.curr_iteration = step
    run.counting(lambda data, model: None)(iter(()), types.SimpleNamespace(vp_stage=None))
    x = quantize(torch.tensor([1.0, value] * 16), "mxfp4")
    run.monitor.observe(f"layer {step}", "fprop", "x", x.tally())


def test_a_nan_is_told_once_and_a_run_that_stays_nan_does_not_repeat_it(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, nan = run_of(), float("nan")
    for step, value in enumerate([1.0, nan, nan, nan, 1.0, float("-inf"), 1.0]):
        break_in(run, step, value)
    run.report()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "iteration 2: the first NaN or Inf was in operand x of fprop in layer 1" in told[0]
    assert "iteration 6:" in told[1] and "pipeline stage 0, rank 0" in told[1]


def test_what_carriers_round_is_told_as_often_as_megatron_logs(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of()
    run.args.log_interval = 2
    for step in range(5):
        run.args.curr_iteration = step
        run.counting(lambda data, model: None)(iter(()), types.SimpleNamespace(vp_stage=None))
        for layer, lost in (("fc1", 2), ("fc2", 40 * (step < 3))):
            run.monitor.observe(layer, "wgrad", "x", torch.tensor([lost, 0]).int())
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1  # of iterations 1, 2 and 3; those after are still on their way
    assert "iteration 2: 42 elements" in told[0]
    assert "most of them (40) in operand x of wgrad in fc2 (pipeline stage 0)" in told[0]


def test_a_run_that_ends_in_its_bad_step_tells_at_once(
    one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of()
    break_in(run, 20, float("inf"))
    break_in(run, 20, float("inf"))  # upstream's rerun
    run.report()
    run.report()
    assert capsys.readouterr().err.count("iteration 21:") == 1
