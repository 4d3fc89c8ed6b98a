#!/usr/bin/env python3
"""Tokenizes a corpus of any size: `megatron-fp4-preprocess`, run from a checkout.

Writes datasets in Megatron's indexed format with a tokenizer that is given, in parallel.

python tools/preprocess.py PATH ... --tokenizer-model MODEL --output data
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, installed or not

from tools.interruption import quiet_interruption  # noqa: E402

with quiet_interruption():
    from megatron_fp4.mcore.data.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
