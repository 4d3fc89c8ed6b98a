"""The named sizes of models of a study, each with the batch that it is trained with."""

from dataclasses import dataclass

from tools import runs


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    batch, micro_batch: in sequences; micro_batch is that of one GPU. gpus: the most GPUs of a run,
    which share its batch. save_interval: steps between checkpoints, from which a run goes on.
    """

    model: runs.Model
    batch: int
    micro_batch: int
    gpus: int = 1
    save_interval: int = 250

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.model.sequence

    def flags(self, training: runs.Training, ranks: int = 1) -> list[str]:
        """Megatron's flags for this model and training; later flags override earlier ones.

        ranks: at least so many data-parallel ranks share the batch.
        """
        micro_batch = ["--micro-batch-size", str(min(self.micro_batch, self.batch // ranks))]
        return [*self.model.flags(), *training.flags(), *micro_batch]


# The name of a size is the number of parameters of its layers, without embeddings.
SIZES = {
    "tiny": Size(
        runs.Model(layers=2, hidden=64, ffn=192, heads=4, query_groups=2, sequence=64),
        batch=8,
        micro_batch=8,
        save_interval=50,
    ),
    "3M": Size(
        runs.Model(layers=4, hidden=256, ffn=704, heads=4, query_groups=4, sequence=256),
        batch=64,
        micro_batch=64,
        save_interval=500,
    ),
    "26M": Size(
        runs.Model(layers=8, hidden=512, ffn=1408, heads=8, query_groups=8, sequence=512),
        batch=256,
        micro_batch=128,
    ),
    "60M": Size(
        runs.Model(layers=12, hidden=640, ffn=1728, heads=10, query_groups=10, sequence=512),
        batch=256,
        micro_batch=64,
        gpus=4,
        save_interval=1000,
    ),
    "150M": Size(
        runs.Model(layers=12, hidden=1024, ffn=2688, heads=16, query_groups=16, sequence=512),
        batch=256,
        micro_batch=64,
        gpus=4,
        save_interval=1000,
    ),
}


def size_order(size: str) -> int:
    """The place of a size among SIZES, from 0, in which tables list sizes: small models first."""
    return [*SIZES].index(size)
