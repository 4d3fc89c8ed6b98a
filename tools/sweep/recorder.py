"""pretrain_gpt.py in BF16, which writes what its linears multiply in the last training step.

    torchrun --nproc-per-node 1 tools/sweep/recorder.py FILE FLAGS ...

FILE is a list of dicts, one for each linear of the decoder: its "name", "x" [tokens, in],
"weight" [out, in] and "gradient", dY [tokens, out], in BF16. `tensors.py` reads it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    """Trains one process. The flags after FILE are those of pretrain_gpt.py."""
    cpu.install()
    path, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
    last: dict[nn.Module, dict[str, Tensor]] = {}
    names: dict[nn.Module, str] = {}
    nn.modules.module.register_module_forward_hook(lambda *call: _keep(last, names, *call))
    pretrain.main()
    torch.save([{"name": names[module], **kept} for module, kept in last.items()], path)


def _keep(
    last: dict[nn.Module, dict[str, Tensor]],
    names: dict[nn.Module, str],
    module: nn.Module,
    inputs: tuple[Any, ...],
    output: Any,
) -> None:
    """Keeps the tensors of this call if it is a linear's in training, in place of the last call's.
    Reads the names once the model is there."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if isinstance(module, GPTModel) and not names:
        names.update({part: name for name, part in module.named_modules()})
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear) or not module.training:
        return
    x, y = inputs[0], output[0]
    if not y.requires_grad:
        return
    kept = last.setdefault(module, {})
    kept["x"] = x.detach().flatten(0, -2).clone()
    kept["weight"] = module.weight.detach().clone()
    y.register_hook(lambda g: kept.update(gradient=g.detach().flatten(0, -2).clone()))


if __name__ == "__main__":
    main()
