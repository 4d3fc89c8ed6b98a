#!/usr/bin/env python3
"""Turns text into a tokenizer and two datasets: `megatron-fp4-prepare-data` from a checkout.

python tools/prepare_data.py [PATH ...] --output data
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, installed or not

from megatron_fp4.mcore.data.prepare_data import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
