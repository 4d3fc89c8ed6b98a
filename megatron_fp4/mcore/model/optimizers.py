"""The parts of Megatron's optimizers. C stands for megatron/core."""

from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that `optimizer` chains, such as one for experts; without a chain, itself.

    They are the same on all ranks. One that has no parameters on this rank is a stub
    (`is_stub_optimizer`), which has no torch optimizer.
    """
    chained = isinstance(optimizer, ChainedOptimizer)
    return list(optimizer.chained_optimizers) if chained else [optimizer]
