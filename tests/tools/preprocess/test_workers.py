"""Ctrl-C at any moment of the pool of workers, and what a caller gets from it."""

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from types import FrameType
from typing import Any

import pytest

from megatron_fp4.mcore.data.corpus import workers
from megatron_fp4.mcore.data.corpus.workers import encoded
from megatron_fp4.mcore.data.errors import DataError

at_fork: list[Callable[[], None]] = []  # called in this process after it has forked another one
os.register_at_fork(after_in_parent=lambda: [call() for call in at_fork])


class Encoder:
    """Stands in for the encoder; its headers are what `encode` returns for a block."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self.encode = encode


def headers(encode: Callable[[Any], Any], blocks: Any, count: int = 2) -> list[Any]:
    with closing(encoded(iter(blocks), Encoder(encode), count)) as made:  # type: ignore[arg-type]
        return list(made)


def sigint() -> None:
    signal.raise_signal(signal.SIGINT)


def workers_left() -> list[Any]:
    """The workers that still run. An earlier test's checkpoint can have left Megatron's manager."""
    running = multiprocessing.active_children()
    return [process for process in running if isinstance(process, workers.ForkProcess)]


def slow_if_even(block: int) -> int:
    time.sleep(0.02 * (block % 2 == 0))
    return block


def test_headers_have_the_order_of_the_blocks() -> None:
    assert headers(slow_if_even, range(9)) == list(range(9))


def test_few_blocks_are_read_ahead() -> None:
    read: list[int] = []
    blocks = (read.append(number) or number for number in range(20))  # type: ignore[func-returns-value]
    made = encoded(blocks, Encoder(slow_if_even), 2)  # type: ignore[arg-type]
    for taken, _ in enumerate(made):
        assert len(read) - taken <= 4 and len(workers_left()) == 2


def test_the_first_block_that_fails_is_raised() -> None:
    def fails(block: int) -> int:
        time.sleep(0.1 * (block == 1))
        if block:
            raise OSError(28, "No space left on device", f"part-{block}")
        return block

    with pytest.raises(OSError, match="part-1") as caught:
        headers(fails, range(4))
    assert "in fails" in caught.value.__notes__[0]  # the worker's traceback
    assert not workers_left()


def test_large_blocks_and_headers_pass() -> None:
    large = bytes(10**6)
    assert headers(lambda block: block, [large] * 5) == [large] * 5


def test_a_worker_that_is_killed_while_it_answers() -> None:
    class Cut:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match="a worker was killed"):
        headers(lambda _: Cut(), range(3))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_workers_are_forked_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    at_fork.append(sigint)
    try:
        with pytest.raises(KeyboardInterrupt):
            headers(slow_if_even, range(2))
        assert not workers_left()
        # Negative control: Python ignores a KeyboardInterrupt of a callback.
        monkeypatch.setattr(workers, "_interrupt_later", nullcontext)
        assert headers(slow_if_even, range(2)) == [0, 1]
    finally:
        at_fork.clear()


def test_a_second_ctrl_c_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    join, joins = workers.ForkProcess.join, []

    def impatient(process: Any) -> None:
        sigint()
        joins.append(process)
        join(process)

    monkeypatch.setattr(workers.ForkProcess, "join", impatient)

    def blocks() -> Any:
        yield 0
        sigint()

    with pytest.raises(KeyboardInterrupt):
        headers(lambda _: time.sleep(60), blocks())
    assert len(joins) == 2 and not workers_left()


def interrupted_at(line: int) -> None:
    """Gets a SIGINT before a line of workers.py, counted as they run, and ends this process.

    The status is 130 after a KeyboardInterrupt, and 0 if fewer lines run.
    """
    os.setpgid(0, 0)
    left, main = line, os.getpid()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != workers.__file__ or os.getpid() != main:
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            sigint()
        return trace

    sys.settrace(trace)
    try:
        headers(lambda block: block, [0], 1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        sys.settrace(None)


@pytest.mark.slow
def test_ctrl_c_at_each_line_ends_the_process_and_its_worker() -> None:
    fork = multiprocessing.get_context("fork")
    for line in itertools.count(1):
        process = fork.Process(target=interrupted_at, args=(line,))
        process.start()
        process.join(20)
        with pytest.raises(ProcessLookupError):  # nothing is left of its group
            os.killpg(process.pid or 0, signal.SIGKILL)
        if process.exitcode == 0:
            break
        assert process.exitcode == 130, f"line {line}"
    assert line > 50
