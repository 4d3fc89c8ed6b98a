"""Parses launches as pretrain_gpt.py does, and trains nothing.

    parse_launches.py <<< '[[processes, [flag, ...]], ...]'

Prints a line of JSON for each launch: its arguments by name, those that JSON can express, or the
text of the ConfigError. The launches are parsed as on a machine with GPUs.
"""

import json
import os
import sys
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    results = os.dup(1)
    os.dup2(2, 1)  # what Megatron prints
    cpu.install()
    from megatron_fp4.mcore.launch import command_line
    from megatron_fp4.mcore.launch.refusals import machine

    machine.gpu = lambda args: iter(())  # type: ignore[assignment]
    for processes, flags in json.load(sys.stdin):
        if os.fork() == 0:  # Megatron's arguments can be set once in a process
            os.environ |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost"}
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as mcore/pretrain.py sets it
            sys.argv[1:] = flags
            try:
                parsed: Any = vars(command_line.parse())
            except ConfigError as error:
                parsed = str(error)
            os.write(results, (json.dumps(expressible(parsed)) + "\n").encode())
            os._exit(0)
        os.wait()


def expressible(parsed: Any) -> Any:
    if isinstance(parsed, str):
        return parsed
    kinds = (bool, int, float, str, type(None))
    return {name: value for name, value in parsed.items() if isinstance(value, kinds)}


if __name__ == "__main__":
    main()
