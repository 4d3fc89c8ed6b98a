#!/usr/bin/env python3
"""Makes one HTML page of a run's metrics, or of two runs, from a checkout.

python -m tools.report RUN [OTHER] [--output FILE]
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the checkout, installed or not

from megatron_fp4.report.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
