"""How far the layouts part on the first step: TP2, TP2 with sequence parallelism, PP2 and DP2
against one process, for each recipe, in float64 and float32.

    python -m benchmarks.layouts --out benchmarks/results/layouts.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.stamp import stamp
from tests.mcore.layouts import CASES, differing_codes, gradient_errors, loss_error, run_layout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        one = run_layout("tp1", Path(folder, "tp1.pt"))
        for layout in dict.fromkeys(layout for layout, _ in CASES):
            many = run_layout(layout, Path(folder, f"{layout}.pt"))
            for case, dtype in one:
                if (layout, case) not in CASES:
                    continue
                pair = one[case, dtype], many[case, dtype]
                operands = [step["operands"] for step in pair]
                rows.append(
                    {
                        "layout": layout,
                        "case": case,
                        "dtype": str(dtype).removeprefix("torch."),
                        "codes": sum(record[3].numel() for record in operands[1]),
                        "differing codes": differing_codes(operands[0], operands[1], dtype),
                        "loss": loss_error(*pair),
                        "largest gradient error": max(gradient_errors(*pair).values()),
                    }
                )
                print(rows[-1], flush=True)
    result = {"what": "first step against one process", "stamp": stamp(args.commit), "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
