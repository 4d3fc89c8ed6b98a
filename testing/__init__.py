"""The harness that tests and benchmarks share. It is not part of the installed package.

oracles.py      independent results in exact arithmetic, which share no code with megatron_fp4
builders/       small models, plans for single operands and products, command lines, a stand-in
                for Transformer Engine
worlds/         trainings and other programs in torchrun worlds on this machine
scripts/        the programs that those worlds run
layouts/        every layout compared with one process, by tests and by benchmarks.layouts
kernels/        the Triton kernels compared with the reference
patching.py     a replaced attribute, in programs that run without pytest

Tests and benchmarks import from here. Nothing here imports from tests/.
"""
