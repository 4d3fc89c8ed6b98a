"""Counts the bytes that each linear of a LLaMA layer sends and keeps under TP2, compared with BF16.

    python -m benchmarks.bytes --out benchmarks/results/bytes.json

Two processes, over NCCL if there are two GPUs and else over gloo, run a step of one layer's four
linears: Megatron's own in BF16, then each recipe's. A dispatch mode counts the bytes sent, and
hooks on saved tensors the bytes kept (bytes_worker.py). Then one process measures how much time the
choices of --fp4-saved-x and --fp4-weight-cache take (bytes_time.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bytes_time import VARIANTS, times
from megatron_fp4.recipes import uniform_recipes
from testing.worlds.launch import spawn
from tools import pages
from tools.stamp import stamp

Record = dict[str, Any]
LINEARS = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
RANKS = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of the layer, and of the tokens that run through it in a step."""

    hidden: int = 512
    ffn: int = 1536
    heads: int = 8
    query_groups: int = 4
    sequence: int = 256
    micro_batch: int = 2
    microbatches: int = 3


@dataclass(frozen=True)
class Case:
    """What is measured: a recipe (or "bf16") with these flags, under tensor parallelism.

    saved_x, weight_cache: as --fp4-saved-x and --fp4-weight-cache.
    """

    recipe: str
    saved_x: str = "packed"
    weight_cache: str = "packed"
    sequence_parallel: bool = True


ALL = uniform_recipes()
CASES = [
    *(Case(recipe) for recipe in ["bf16", *ALL]),
    *(Case(recipe, sequence_parallel=False) for recipe in ["bf16", *ALL]),
    *(Case(recipe, saved_x="bf16") for recipe in ALL),
    *(Case(recipe, weight_cache=kept) for recipe in ALL for kept in ("decoded", "off")),
]


def count(shape: Shape, module: str = "benchmarks.bytes_worker") -> list[Record]:
    """Runs bytes_worker.py in two processes and returns its records. Raises RuntimeError if it
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "records.json")
        worker = (Path("-m"), module, str(out), "--shape", json.dumps(asdict(shape)))
        done = spawn(RANKS, *worker, fresh=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-4000:])
        return json.loads(out.read_text())


def find(records: list[Record], case: Case, linear: str) -> Record:
    """The record of one linear in one case."""
    wanted = asdict(case) | {"linear": linear}
    return next(r for r in records if r.items() >= wanted.items())


# --- tables ---------------------------------------------------------------------------------------


def travels_table(records: list[Record], sequence_parallel: bool) -> list[str]:
    """A Markdown table of a microbatch's bytes by linear and recipe, with ratios to BF16."""
    kinds = ["all-gather"] if sequence_parallel else []
    heads = [f"{kind} {way}" for kind in kinds for way in ("forward", "backward")]
    heads += ["sums and maxima forward", "backward", "saved for backward", "held beside it"]
    body = []
    for linear in LINEARS:
        base = None
        for recipe in ["bf16", *ALL]:
            case = Case(recipe, sequence_parallel=sequence_parallel)
            record = find(records, case, linear)
            sizes = [record[way].get("all-gather", 0) for way in ("forward", "backward")]
            sizes = sizes if sequence_parallel else []
            for way in ("forward", "backward"):
                sizes.append(sum(v for kind, v in record[way].items() if kind != "all-gather"))
            sizes += [record["saved"], record["beside"]]
            base = base or sizes
            cells = [_ratio(size, of) for size, of in zip(sizes, base, strict=True)]
            body.append([linear, recipe, *cells])
    return pages.table(["linear", "recipe", *heads], body)


def step_table(records: list[Record], microbatches: int) -> list[str]:
    """A Markdown table of the bytes that a rank sends for the layer in a whole step, with sequence
    parallelism and without."""
    body = []
    sums = {}
    for recipe in ["bf16", *ALL]:
        for parts in (True, False):
            case = Case(recipe, sequence_parallel=parts)
            found = [find(records, case, linear) for linear in LINEARS]
            each = sum(sum(r["forward"].values()) + sum(r["backward"].values()) for r in found)
            sums[recipe, parts] = microbatches * each + _sum(found, "sent once a step")
        cells = [_ratio(sums[recipe, parts], sums["bf16", parts]) for parts in (True, False)]
        body.append([recipe, *cells])
    return pages.table(["recipe", "sequence parallel", "without"], body)


def weights_table(records: list[Record]) -> list[str]:
    """A Markdown table of what is made and held of the layer's weights, by --fp4-weight-cache."""
    head = ["recipe", "W's operands", "quantized in a step, cached", "off"]
    head += ["kept, packed", "kept, decoded", "off: saved more for each microbatch"]
    body = []
    for recipe in ALL:
        packed, decoded, off = (
            [find(records, Case(recipe, weight_cache=kept), linear) for linear in LINEARS]
            for kept in ("packed", "decoded", "off")
        )
        whole = _sum(packed, "W")
        cells = [str(packed[0][key]) for key in ("W operands", "W quantized")]
        cells.append(str(off[0]["W quantized"]))
        cells += [_ratio(_sum(kept, "kept of W"), whole) for kept in (packed, decoded)]
        cells.append(_ratio(_sum(off, "saved") - _sum(packed, "saved"), whole))
        body.append([recipe, *cells])
    return pages.table(head, body)


def saved_x_table(records: list[Record]) -> list[str]:
    """A Markdown table of the bytes of X that the four linears save for a microbatch, by
    --fp4-saved-x."""
    body = []
    base = _sum([find(records, Case("bf16"), linear) for linear in LINEARS], "saved")
    for recipe in ALL:
        cases = Case(recipe), Case(recipe, saved_x="bf16")
        sizes = [_sum([find(records, c, linear) for linear in LINEARS], "saved") for c in cases]
        body.append([recipe, *(_ratio(size, base) for size in sizes)])
    return pages.table(["recipe", "packed", "bf16"], body)


def times_table(taken: dict[str, dict[str, float]]) -> list[str]:
    """A Markdown table of the milliseconds of a microbatch, with ratios to the default flags.

    taken: from `bytes_time.times`.
    """
    body = []
    for recipe, found in taken.items():
        base = found["both packed"]
        body.append([recipe, *(f"{t:.1f} ({t / base:.2f})" for t in found.values())])
    return pages.table(["recipe", *VARIANTS], body)


def _ratio(size: int, base: int) -> str:
    """A number of bytes, with its ratio to BF16's number if they differ."""
    return f"{size:,}" if base in (0, size) else f"{size:,} ({size / base:.3f})"


def _sum(records: list[Record], key: str) -> int:
    return sum(record[key] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="of the timing")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bytes.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    shape = Shape()
    records = count(shape)
    tokens = shape.sequence * shape.micro_batch
    taken = times(tokens, shape.hidden, shape.ffn, shape.microbatches, args.rounds)
    result: Record = {
        "what": "bytes that a rank sends and keeps in each linear for a microbatch; "
        f"ms a microbatch of a linear of {tokens} tokens, {shape.hidden} -> {shape.ffn}",
        "stamp": stamp(args.commit),
        "shape": asdict(shape),
        "records": records,
        "times": taken,
        "table": {
            "with sequence parallelism": travels_table(records, True),
            "without": travels_table(records, False),
            "a step": step_table(records, shape.microbatches),
            "saved X": saved_x_table(records),
            "weights": weights_table(records),
            "times": times_table(taken),
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, lines in result["table"].items():
        print(f"\n{name}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
