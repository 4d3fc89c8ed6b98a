#!/usr/bin/env python3
"""Prepares text for training: `megatron-fp4-prepare-data`, run from a checkout.

Trains a tokenizer and writes a training and a validation dataset in Megatron's indexed format.

python tools/prepare_data.py [PATH ...] --output data
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, installed or not

from tools.interruption import quiet_interruption  # noqa: E402

with quiet_interruption():
    from megatron_fp4.mcore.data.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
