"""The harness that tests and benchmarks share. It is not part of the installed package.

oracles.py      independent results in exact arithmetic, which share no code with megatron_fp4
builders/       small models, plans for single operands and products, a stand-in for
                Transformer Engine

Tests and benchmarks import from here. Nothing here imports from tests/.
"""
