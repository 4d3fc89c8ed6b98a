"""The harness that tests and benchmarks share. It is not part of the installed package.

oracles.py      independent results in exact arithmetic, which share no code with megatron_fp4
builders/       small models, plans for single operands and products, command lines, a stand-in
                for Transformer Engine
worlds/         trainings and other programs in torchrun worlds on this machine, nodes with networks
                of their own, a Slurm cluster
scripts/        the programs that those worlds run
own_megatron/   training scripts as users of Megatron write them, which know nothing of this package
layouts/        every layout compared with one process, by tests and by benchmarks.layouts
kernels/        the Triton kernels compared with the reference
examples.py     the scripts of examples/ with small models
fused_adam.py   a stand-in for Transformer Engine's optimizer
exchanges.py    mistakes in the exchange of gradients, and situations in which it has to be right
launches.py     what the scripts of examples/ launch, without a cluster
low_bit.py      optimizers with moments in few bits, and numbers for them to round
patching.py     a replaced attribute, in programs that run without pytest

Tests and benchmarks import from here. Nothing here imports from tests/.
"""
