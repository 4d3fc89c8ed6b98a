"""pretrain_gpt.py as Megatron's distributed optimizer is where Transformer Engine is installed.

    torchrun ... pretrain_as_with_fused_adam.py FLAGS ...

It then saves and loads the number of steps of a FusedAdam. The optimizer must be Q-Ramping's.
"""

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_TE_OPTIMIZER = True
    pretrain.main()


if __name__ == "__main__":
    main()
