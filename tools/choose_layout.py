#!/usr/bin/env python3
"""Ranks parallel layouts by their estimated speed, from a checkout.

python -m tools.choose_layout --gpu h200 --gpus 64 --recipe tetrajet --global-batch-size 512
    --seq-length 4096 --hf-config config.json
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, installed or not

from megatron_fp4.estimate.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
