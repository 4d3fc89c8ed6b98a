#!/usr/bin/env python3
"""Reads, converts and compares checkpoints: `megatron-fp4-checkpoint`, run from a checkout.

python -m tools.checkpoint --help
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, installed or not

from tools.interruption import quiet_interruption  # noqa: E402

with quiet_interruption():
    from megatron_fp4.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
