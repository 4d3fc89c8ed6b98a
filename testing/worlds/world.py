"""A torchrun world that keeps running, so that tests do not repeat the imports.

Its processes have imported torch and Megatron, and fork for each script that they run. A launch of
torchrun for one script takes several times as long, most of it for imports.

    torchrun ... world.py PORT

PORT is the port of a TCPStore in the process of the tests. Its keys are "job N", a JSON list
[script, arguments, output file]; "N ended R", the exit status of rank R; and "N failed", which is
set as soon as one status is not 0. An empty job ends the world.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]
FOREVER = timedelta(days=1)
POLL_S = 0.05  # seconds between looks at what may have ended
# What a training imports, some of it late. A child that finds it imported ends a second sooner.
NEEDED = [
    *("megatron_fp4.mcore.loop.gpt", "megatron_fp4.mcore.pretrain"),
    *("megatron.core.tokenizers.text", "megatron.core.models.mimo", "torch._dynamo"),
]
GRACE_S = 10  # seconds between SIGTERM and SIGKILL, for the other ranks when one has failed


class World:
    """Processes that run scripts, one after the other, each script in a fork of every process."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._jobs = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._log = NamedTemporaryFile()  # output of the world itself, not of its jobs
        self._launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(processes), __file__, str(self._store.port)),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=open(self._log.name, "w"),
            stderr=subprocess.STDOUT,
        )
        atexit.register(self._end)

    def run(self, script: Path, arguments: list[str], timeout_s: float) -> tuple[int, str]:
        """Runs a script; returns (exit status, 0 or 1; what the ranks printed).

        Raises TimeoutError, with the last output, if it is still running after timeout_s seconds,
        and RuntimeError, with the output of the world, if a process of the world has ended.
        """
        number = self._jobs
        with NamedTemporaryFile("r", errors="replace") as output:
            self._add([str(script), arguments, output.name])
            ends = [f"{number} ended {rank}" for rank in range(self.processes)]
            if not self._wait(ends, timeout_s):
                self._store.set(f"{number} failed", "the limit")
                self._wait(ends, 2 * GRACE_S)
                printed = output.read()[-4000:] or self._told()[-4000:]
                raise TimeoutError(f"still running after {timeout_s} s: {printed}")
            statuses = [int(self._store.get(end)) for end in ends]
            told = f"\nranks ended with {statuses}\n" if any(statuses) else ""
            return int(any(statuses)), output.read() + told

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Waits until the store has these keys, but no longer than timeout_s seconds; returns
        whether it has them.

        Raises RuntimeError if the launcher ends before, as it does when one of its processes fails.
        """
        limit = time.monotonic() + timeout_s
        while not self._store.check(keys):
            if (status := self._launcher.poll()) is not None:
                raise RuntimeError(f"the world ended with status {status}: {self._told()}")
            if time.monotonic() > limit:
                return False
            time.sleep(POLL_S)
        return True

    def _told(self) -> str:
        """What the processes of the world itself have printed."""
        return Path(self._log.name).read_text(errors="replace")

    def _add(self, job: list[Any]) -> None:
        self._store.set(f"job {self._jobs}", json.dumps(job))
        self._jobs += 1

    def _end(self) -> None:
        self._add([])
        self._launcher.wait(60)


@cache
def world(processes: int) -> World:
    """Returns the running World with this many processes; the first call starts it."""
    return World(processes)


# --- in the world --------------------------------------------------------------------------------


def serve(jobs: TCPStore) -> None:
    """Runs jobs until one is empty, or until the tests' process, which has the store, ends."""
    with suppress(torch.distributed.DistNetworkError):
        for number in count():
            job = json.loads(jobs.get(f"job {number}"))
            if not job:
                return
            run_job(jobs, number, *job)


def run_job(jobs: TCPStore, number: int, script: str, arguments: list[str], output: str) -> None:
    rank = os.environ["RANK"]
    if rank == "0":  # for init_process_group; it outlives the ranks, as torchrun's store does
        store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        jobs.set(f"{number} port", str(store.port))
    os.environ["MASTER_PORT"] = jobs.get(f"{number} port").decode()
    child = os.fork()
    if not child:
        in_the_child(script, arguments, output)
    status = end_of(child, jobs, f"{number} failed")
    if status:
        jobs.set(f"{number} failed", f"rank {rank}")
    jobs.set(f"{number} ended {rank}", str(status))
    if rank == "0":
        jobs.wait([f"{number} ended {each}" for each in range(int(os.environ["WORLD_SIZE"]))])


def end_of(child: int, jobs: TCPStore, failed: str) -> int:
    """Waits for a child process and returns its exit status.

    If the key `failed` is set, the child's process group is ended: by SIGTERM, and after GRACE_S
    seconds by SIGKILL.
    """
    told_at: float | None = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if told_at is None and jobs.check([failed]):
            told_at = time.monotonic()
            signal_group(child, signal.SIGTERM)
        elif told_at is not None and time.monotonic() > told_at + GRACE_S:
            signal_group(child, signal.SIGKILL)
        time.sleep(POLL_S)


def signal_group(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, number)


def in_the_child(script: str, arguments: list[str], output: str) -> None:
    status = 1
    try:
        os.setsid()  # a group of its own, for the processes that saving starts
        signal.signal(signal.SIGTERM, leave)
        file = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):  # as Python itself does at the end
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        # A script that ends runs these functions too. They end the process that saving started.
        # sys.exit would then join the threads of the parent's store, which a fork does not have.
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)


def leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def main() -> None:
    from megatron_fp4.mcore.runtime import cpu

    cpu.install()
    for name in NEEDED:
        import_module(name)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Saving keeps a queue in a process of its own, which would import torch for every script.
    filesystem_async.get_write_results_queue.__wrapped__.__defaults__ = ("fork",)
    serve(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=FOREVER))


if __name__ == "__main__":
    main()
