"""SHA-256 digests of all quantizers, recipes and layouts, to compare two versions of the code.

    python -m benchmarks.digests --out before.json
    python -m benchmarks.digests --against before.json

A change that must not change any bit has equal digests before and after it, on one machine. Another
device or another version of torch may sum products in another order, and give other digests. If
digests differ, prints which, and exits with status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp4 import Linear, list_quantizers, list_recipes, quantize
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import flags_of, small_recipe
from testing.worlds.checkpoint_contents import contents, flat
from testing.worlds.launch import train
from tools.stamp import stamp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOKENS, IN, OUT, STEPS = (2, 64), 128, 192, 2
# The layouts: for each name the number of processes and Megatron's flags.
LAYOUTS = {
    "one": (1, ""),
    "recomputed": (
        1,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "sharded": (2, "--use-distributed-optimizer"),
    "ep2": (2, "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2"),
}
COMMON = "--bf16 --ffn-hidden-size 128 --save-interval 4".split()


def digest(tensors: Iterable[Tensor]) -> str:
    """One SHA-256 of the dtypes, shapes and bytes of these tensors, in this order."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        sha256.update(f"{data.dtype}{tuple(data.shape)}".encode())
        sha256.update(data.flatten().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def drawn(seed: int, *shape: int) -> Tensor:
    """A float64 tensor of this shape: normal values times powers of two from 1/16 to 8, so that
    block scales differ. In about a tenth of its rows the first 32 columns are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-4, 4, shape, generator=generator))
    x[..., :32] *= torch.rand(shape[:-1], generator=generator).gt(0.1)[..., None]
    return x


def quantized() -> dict[str, str]:
    """For each registered quantizer, input dtype and axis: the digest of its codes and scales."""
    found = {}
    for name, dtype, axis in itertools.product(list_quantizers(), DTYPES, (0, 1)):
        made = quantize(drawn(1, 64, 96).to(DEVICE, dtype), name, axis=axis, seed=3)
        found[f"quantize {name} {dtype} axis {axis}"] = digest([made.codes, made.scales])
    return found


def linears() -> dict[str, str]:
    """For each recipe and dtype, with a bias and without: the digest of a linear's output, dX, dW
    and bias gradient in STEPS training steps."""
    found = {}
    for name, dtype, bias in itertools.product(uniform_recipes(), DTYPES, (False, True)):
        layer = Linear(IN, OUT, bias, recipe=small_recipe(name), seed=5, device=DEVICE, dtype=dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(layer.parameters()):
                parameter.copy_(drawn(seed, *parameter.shape))
        results: list[Tensor] = []
        for step in range(STEPS):
            x = drawn(10 + step, *TOKENS, IN).to(DEVICE, dtype).requires_grad_()
            y = layer(x)
            y.backward(drawn(20 + step, *TOKENS, OUT).to(DEVICE, dtype))
            assert x.grad is not None
            results += [y, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
        found[f"linear {name} {dtype}{' bias' * bias}"] = digest(results)
    return found


def trainings(layouts: Iterable[str]) -> dict[str, str]:
    """For each layout and recipe: the digest of all tensors, weights and optimizer state, in the
    checkpoint that Megatron's training loop saves after four steps."""
    found = {}
    for layout, recipe in itertools.product(layouts, list_recipes()):
        processes, flags = LAYOUTS[layout]
        with tempfile.TemporaryDirectory() as folder:
            train(processes, *COMMON, *flags_of(recipe), *flags.split(), "--save", folder)
            leaves = dict(flat(contents(Path(folder) / "iter_0000004")))
        found[f"training {layout} {recipe}"] = digest(
            leaf for _, leaf in sorted(leaves.items()) if isinstance(leaf, Tensor)
        )
        print(f"{layout} {recipe}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the digests")
    parser.add_argument("--against", type=Path, help="digests of another version, to compare with")
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    given = parser.parse_args()
    found = quantized() | linears() | trainings(given.layouts)
    if given.out:
        text = json.dumps({"stamp": stamp(), "digests": found}, indent=1)
        given.out.write_text(text + "\n")
    if given.against is None:
        return 0
    known = json.loads(given.against.read_text())["digests"]
    differing = [name for name in found if name in known and found[name] != known[name]]
    both = sum(name in known for name in found)
    print(f"{both - len(differing)} of {both} digests are equal", *differing, sep="\n  ")
    return int(bool(differing) or not both)


if __name__ == "__main__":
    sys.exit(main())
