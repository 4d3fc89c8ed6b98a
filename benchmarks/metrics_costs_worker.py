"""The training of benchmarks/metrics_costs.py, which follows rows of weights in some steps only.

Runs pretrain_gpt.py as benchmarks/training_step_worker.py does.

    torchrun -m benchmarks.metrics_costs_worker <Megatron's flags>
"""

from __future__ import annotations

from benchmarks import training_step_worker
from benchmarks.metrics_costs import FOLLOWED
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    from megatron_fp4.mcore.loop import metrics
    from megatron_fp4.metrics import weights

    metrics.WINDOW = weights.WINDOW = FOLLOWED
    training_step_worker.main()


if __name__ == "__main__":
    main()
