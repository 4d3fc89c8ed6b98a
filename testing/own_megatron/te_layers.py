"""A script that asks for Transformer Engine's layers, with stand-ins for their classes.

Megatron's file of Transformer Engine's classes gets empty ones, which cannot run: a launch works
only if none of them is built. The stand-in for its norm is the norm of pretrain_gpt.py.
"""

from functools import partial

from layers import block
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.identity_op import IdentityOp
from provider import main

from megatron_fp4.mcore.model.norm import Norm

NAMES = ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear")

if __name__ == "__main__":
    for name in NAMES:
        stand_in = type(name, (), {"__module__": transformer_engine.__name__})
        setattr(transformer_engine, name, stand_in)
    transformer_engine.TENorm = Norm
    fused, column, row = (getattr(transformer_engine, name) for name in NAMES)
    linears = {"linear_qkv": fused, "linear_proj": row, "linear_fc1": fused, "linear_fc2": row}
    main(partial(block, norm=IdentityOp, **linears))
