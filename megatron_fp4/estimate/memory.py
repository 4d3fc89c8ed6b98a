"""Memory of a rank, by what it is for."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_fp4.arithmetic.messages import FORMS, PIECE_BYTES, SLOTS
from megatron_fp4.arithmetic.moments import FLOAT32
from megatron_fp4.arithmetic.ramping import MOVEMENT_BYTES, SNAPSHOT_BYTES
from megatron_fp4.estimate.layout import Layout, Stage, linears, parameters
from megatron_fp4.estimate.model import LayerLinear, Model, Parameters
from megatron_fp4.estimate.plans import by_phases, plan
from megatron_fp4.makers.base import OperandPlan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import held_bytes, operand_bytes, saved_bytes
from megatron_fp4.plan.owned_codes import codes_recipe, reads_average
from megatron_fp4.recipe import Recipe
from megatron_fp4.target import Target

# Bytes of a logit while the loss is computed: the logits in BF16 and float32, and a gradient in
# BF16.
LOGIT = 2 + 4 + 2
# Bytes of a parameter that torch's Adam takes while it runs, if it is not fused: the denominator,
# in float32.
ADAM = 4


class Memory(NamedTuple):
    """Bytes on a rank at the peak of a step.

    weights: of the model, in BF16. gradients: main_grad, and the buffers through which they are
    sent in fewer bits. optimizer: the float32 weights and both moments of Adam, and states beside
    weights. activations: what microbatches in flight save. held: quantized weights that are held
    over a step, or over the run where ranks gather them as codes. temporary: what lives for one
    operation: of a layer's backward pass, of the loss, or of the optimizer.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    held: float
    temporary: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def state(self) -> float:
        """What is there between steps."""
        return self.weights + self.gradients + self.optimizer + self.held


def memory(model: Model, layout: Layout, recipe: Recipe, target: Target, stage: Stage) -> Memory:
    """The memory of a rank of a pipeline stage at the peak of a step, in the phase of the recipe
    that takes the most.

    Without CUDA graphs the peak is in the backward pass or in the optimizer, which take their
    memory one after the other. With graphs the activations have memory of their own, which the
    optimizer cannot take.
    """
    weights, gradients, optimizer = states(model, layout, recipe, stage)
    optimizer += calibration(model, layout, recipe, stage)
    codes, found = codes_bytes(model, layout, recipe, stage), []
    for phase, own in by_phases(recipe, layout):
        plans = LayerPlans(model, own, phase, target)
        saved, held, temporary = _in_use(model, own, plans, stage)
        found.append(Memory(weights, gradients, optimizer, saved, held + codes, temporary))
    return max(found, key=lambda one: one.total)


def _in_use(
    model: Model, layout: Layout, plans: LayerPlans, stage: Stage
) -> tuple[float, float, float]:
    """(activations, held, temporary), as in `Memory`: bytes on a rank of the stage at the peak of a
    step. plans: of the layers' linears, for the phase of the recipe that holds in this step."""
    held = sum(plans.held(kind) for kind in stage.layers)
    saved = activations(layout, plans, stage)
    backward = max((plans.backward(kind) for kind in stage.layers), default=0.0)
    if layout.recompute:  # of the layer whose activations are computed again
        backward += max((plans.saved(kind) for kind in stage.layers), default=0.0)
    working = max(backward, logits(model, layout) if stage.last else 0.0)
    adam = adam_bytes(model, layout, stage)
    if layout.graphs:
        temporary = max(working, adam)
    elif adam > saved + working:
        saved, temporary = 0.0, adam
    else:
        temporary = working
    return saved, held, temporary


# --- states ---------------------------------------------------------------------------------------


def states(
    model: Model, layout: Layout, recipe: Recipe, stage: Stage
) -> tuple[float, float, float]:
    """(weights, gradients, optimizer): bytes on a rank between steps, without quantized weights.

    Megatron keeps for each parameter 2 bytes of weight in BF16, 4 of main_grad (2 with
    `Layout.bf16_gradients`) and, in the optimizer, 4 of the float32 weight and 8 of Adam's moments,
    or less (`Layout.moments`). The distributed optimizer spreads the optimizer's over the
    data-parallel ranks. A recipe's own state beside weights is the optimizer's too (an average 4
    bytes, Q-Ramping 8). Where the distributed optimizer spreads it, a layer reads a copy of the
    whole average, in 4 bytes more, unless W comes as codes.
    """
    held, own = parameters(model, layout, stage), linears(model, layout, stage)
    kept = sum(dtype.itemsize for dtype in recipe.kept_dtypes.values())
    optimizer = optimizer_bytes(held, layout, 4 + layout.moments.bytes)
    optimizer += optimizer_bytes(own, layout, kept)
    has_copies = layout.sharded and reads_average(recipe, layout.sent_w)
    copies = 4.0 * len(recipe.weight_states) * own.total if has_copies else 0.0
    gradients = layout.main_grad.itemsize * held.total + gradient_buffers(held, layout)
    return 2.0 * held.total, gradients, optimizer + copies


def calibration(model: Model, layout: Layout, recipe: Recipe, stage: Stage) -> float:
    """The bytes that Q-Ramping adds on a rank during a calibration: copies of the float32 weights
    and of both moments, and the movements of the linears' weights. 0 for a recipe without it."""
    if recipe.ramping is None:
        return 0.0
    copies = optimizer_bytes(parameters(model, layout, stage), layout, SNAPSHOT_BYTES)
    return copies + optimizer_bytes(linears(model, layout, stage), layout, MOVEMENT_BYTES)


def codes_bytes(model: Model, layout: Layout, recipe: Recipe, stage: Stage) -> float:
    """The bytes of the codes as which W is gathered. They are there in all phases, also in those
    that gather W in BF16. 0 where no phase reads codes."""
    own = codes_recipe(recipe) if layout.sent_w else None
    if own is None or own.fprop.b is None:
        return 0.0
    return float(own.fprop.b.nbytes(1, linears(model, layout, stage).total))


def gradient_buffers(held: Parameters, layout: Layout) -> float:
    """Bytes of the buffers through which gradients are sent in few bits: for each piece that
    travels, what is sent and what is received. held: the parameters on the rank."""
    if layout.gradients is None:
        return 0.0
    form = FORMS[layout.gradients]
    sent = [held.dense * (layout.dp > 1), held.experts * (layout.expert_dp > 1)]
    elements = min(max(sent), PIECE_BYTES / form.dtype.itemsize)
    return 2 * SLOTS * elements * form.bits / 8


def optimizer_bytes(held: Parameters, layout: Layout, each: float) -> float:
    """Bytes on a rank of what takes `each` bytes for a parameter that the rank updates.

    held: the parameters on the rank.
    """
    if not layout.sharded:
        return each * held.total
    return each * (held.dense / layout.dp + held.experts / layout.expert_dp)


def adam_bytes(model: Model, layout: Layout, stage: Stage) -> float:
    """Bytes on a rank that are in use only while the optimizer updates the weights.

    Adam without fused kernels takes a float32 tensor of each parameter's size (ADAM). If main_grad
    is BF16, Megatron makes float32 copies of all gradients that the rank updates before the first
    update. Both are per parameter that the rank updates.
    """
    fused = layout.fused_kernels or layout.moments != FLOAT32
    each = (0.0 if fused else ADAM) + (4.0 if layout.bf16_gradients else 0.0)
    return optimizer_bytes(parameters(model, layout, stage), layout, each)


# --- activations ----------------------------------------------------------------------------------


def in_flight(layout: Layout, stage: Stage) -> int:
    """The most microbatches whose activations one chunk's worth of a stage holds at a time, summed
    over its chunks (1F1B, interleaved with virtual stages)."""
    behind = layout.pp - stage.rank - 1
    if layout.vpp == 1:
        return min(layout.microbatches, behind + 1)
    warm_up = 2 * behind + (layout.vpp - 1) * layout.pp
    return min(layout.microbatches * layout.vpp, warm_up + 1)


def activations(layout: Layout, plans: LayerPlans, stage: Stage) -> float:
    """Bytes that the microbatches in flight save for backward on a rank of a stage."""
    if layout.recompute:
        each = len(stage.layers) * plans.residual
    else:
        each = sum(plans.saved(kind) for kind in stage.layers)
    ends = plans.residual if stage.first else 0.0  # the embedding's output
    return (each + ends) / layout.vpp * in_flight(layout, stage)


def logits(model: Model, layout: Layout) -> float:
    """Bytes that the head and the loss take for a microbatch."""
    tokens = layout.micro_batch * model.sequence
    return LOGIT * tokens * model.padded_vocabulary(layout.tp) / layout.tp


class LayerPlans:
    """The plans of a layer's linears on a rank, and what the layer saves for a microbatch."""

    def __init__(self, model: Model, layout: Layout, recipe: Recipe, target: Target) -> None:
        self._model, self._layout = model, layout
        self._of = {
            kind: [(x, plan(x, model, layout, recipe, target)) for x in model.linears(kind)]
            for kind in {model.has_experts(layer) for layer in range(model.layers)}
        }
        self.tokens = layout.micro_batch * model.sequence
        self.own = self.tokens / (layout.tp if layout.sp else 1)
        self.residual = 2.0 * self.own * model.hidden  # bytes of the layer's input on a rank

    def linears(self, has_experts: bool) -> list[tuple[LayerLinear, LinearPlan, int]]:
        """(linear, its plan, how many of them a rank has) of one layer."""
        local = self._model.experts // self._layout.ep
        return [(one, made, local if one.expert else 1) for one, made in self._of[has_experts]]

    def held(self, has_experts: bool) -> float:
        """Bytes of the quantized weights that a layer holds over a step."""
        return float(sum(held_bytes(made) * n for _, made, n in self.linears(has_experts)))

    def saved(self, has_experts: bool) -> float:
        """Bytes that a layer saves for the backward pass of a microbatch."""
        return sum(self.saved_tensors(has_experts).values())

    def saved_tensors(self, has_experts: bool) -> dict[str, float]:
        """The bytes of each tensor that a layer saves for the backward pass of a microbatch.

        The inputs of linears are saved as their plans say. Queries, keys and values are the
        projection's output, or what one kernel makes of it (`Layout.fused_kernels`). All layers
        share that kernel's cosines and sines, but for CUDA graphs, each of which has its own. Other
        kernels make rotated queries and keys beside the projection's output, of which the values
        are a view.
        """
        model, tp = self._model, self._layout.tp
        width, keys = model.attention_width / tp, model.key_width / tp
        attended = 2 * width * self.tokens
        found = {
            "inputs of norms": 2 * self.residual,
            "queries, keys and values": 2 * (width + 2 * keys) * self.tokens,
        }
        if model.rope and self._layout.fused_kernels and self._layout.graphs:
            found["sines and cosines"] = 4.0 * self.tokens * model.channels
        elif model.rope and not self._layout.fused_kernels:
            found["rotated queries and keys"] = 2 * (width + keys) * self.tokens
            found["sines and cosines"] = 2.0 * 2 * 2 * model.sequence * model.channels
        found["float32 sums of attention"] = 4 * model.heads / tp * self.tokens
        for linear, made, count in self.linears(has_experts):
            kept = float(saved_bytes(made))
            if linear.name == "linear_proj":
                # Attention saves its output, which is X of linear_proj, in any case.
                found["output of attention"] = attended
                kept = max(kept - attended, 0.0) if _keeps_x(made) else kept
            found[f"X of {linear.name}"] = kept * count
            if linear.name.endswith("linear_fc1"):
                rows, columns = made.setting.shape("dy", is_part=False)
                each = 1.0 if model.fp8_input else 2.0
                found[f"output of {linear.name}"] = each * rows * columns * count
        found["rows of tokens"] = 8.0 * self.tokens
        if has_experts:
            found["routing"] = self._routing(model)
        return {name: size for name, size in found.items() if size}

    def _routing(self, model: Model) -> float:
        """Scores of all experts in float32, and the experts' outputs, which their weights
        multiply."""
        return self.own * (3 * 4 * model.experts + 2 * model.top_k * model.hidden)

    def backward(self, has_experts: bool) -> float:
        """Bytes that the backward pass of a layer takes for a moment.

        This is while fc1 runs: the gradients of fc1's output, of the activation function's output
        and of both sums, and fc1's operands of dY as they are multiplied. Megatron's SwiGLU, which
        may run before it, converts an input in FP8 to BF16.
        """
        widest = 0.0
        for linear, made, _ in self.linears(has_experts):
            if not linear.name.endswith("linear_fc1"):
                continue
            rows, columns = made.setting.shape("dy", is_part=False)
            gates = 2 if self._model.gated else 1
            operands = [gemm.a for gemm in (made.dgrad, made.wgrad) if gemm is not None]
            others = sum(map(_multiplied_bytes, operands))
            if self._model.fp8_input:
                others = max(others, 2 * rows * columns)
            widest = max(widest, rows * columns * (2 + 2 / gates) + others)
        return widest + 2 * self.residual


def _multiplied_bytes(operand: OperandPlan) -> int:
    """The bytes that a GEMM reads of an operand, if that is not the BF16 matrix which the operand
    is made of: its FP8 elements, or its codes and scales. 0 if the GEMM reads the matrix."""
    if operand.carrier is not None:
        return math.prod(operand.shape)
    return operand_bytes(operand) if operand.is_quantized else 0


def _keeps_x(made: LinearPlan) -> bool:
    """Whether a linear saves X itself for backward, and not 4-bit codes or another matrix alone."""
    is_x = made.wgrad is None or made.wgrad.b.source != "centered"
    return (made.saves_x == "model" and is_x) or made.estimates_x is not None
