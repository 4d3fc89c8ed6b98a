"""Worker processes that tokenize blocks, several at a time and in their order.

Each worker has a pipe of its own, and the main process has no thread besides. So a worker that is
killed leaves no lock behind that another process or thread waits for, and nor does a
KeyboardInterrupt of the main process.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from megatron_fp4.mcore.data.corpus.blocks import Block
from megatron_fp4.mcore.data.corpus.encoding import Encoder
from megatron_fp4.mcore.data.corpus.parts import Header
from megatron_fp4.mcore.data.errors import DataError

_BLOCKS_PER_WORKER = 2  # read ahead, so that no worker waits; this bounds the memory of all blocks


def encoded(blocks: Iterator[Block], encoder: Encoder, workers: int) -> Generator[Header]:
    """The headers of the parts that `workers` processes write for `blocks`, in their order.

    Raises what Encoder.encode raises for the first block that fails, and DataError if a worker is
    killed. No worker outlives the generator. It has to run in the main thread.
    """
    with _workers(encoder, workers) as idle:
        tasks = _Tasks(idle)
        for block in blocks:
            tasks.add(block)
            if len(tasks) >= _BLOCKS_PER_WORKER * workers:
                yield tasks.next()
        while tasks:
            yield tasks.next()


@dataclass
class _Task:
    """A block, until a worker has it. When it is done, its header or what encoding it raised."""

    block: Block | None
    result: Header | Exception | None = None
    is_done: bool = False


class _Tasks:
    """The blocks that are waiting for a worker, are being encoded, or are done, in their order.

    `next` takes the header of the first one out. idle: a pipe to each worker, all without a block.
    """

    def __init__(self, idle: list[Connection]) -> None:
        self._idle, self._busy = idle, dict[Connection, _Task]()
        self._all, self._waiting = deque[_Task](), deque[_Task]()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, block: Block) -> None:
        """Adds a block, and gives blocks to workers that are idle, without waiting for others."""
        task = _Task(block)
        self._all.append(task)
        self._waiting.append(task)
        self._collect(timeout=0)
        self._give()

    def next(self) -> Header:
        """The header of the first block, which is waited for and dropped, or what it raised."""
        while not self._all[0].is_done:
            self._collect(timeout=None)
            self._give()
        result = self._all.popleft().result
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    def _collect(self, timeout: float | None) -> None:
        for pipe in wait(list(self._busy), timeout):
            assert isinstance(pipe, Connection)
            with _worker_lives():
                result = pipe.recv()
            task = self._busy.pop(pipe)
            task.result, task.is_done = result, True
            self._idle.append(pipe)

    def _give(self) -> None:
        while self._idle and self._waiting:
            pipe, task = self._idle.pop(), self._waiting.popleft()
            with _worker_lives():
                pipe.send(task.block)  # waits only for the worker, which is about to receive it
            task.block = None
            self._busy[pipe] = task


@contextmanager
def _worker_lives() -> Iterator[None]:
    """A context that uses the pipe of a worker. Raises DataError if the worker has ended."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise DataError(
            "a worker was killed, perhaps since memory ran out: give the same command with fewer "
            "--workers, and it goes on"
        ) from error


@contextmanager
def _workers(encoder: Encoder, count: int) -> Iterator[list[Connection]]:
    """The pipes of `count` workers, which are killed at the end of the context.

    They are forked, so that they share the memory of the tokenizer. Raises DataError if the system
    cannot have so many.
    """
    processes: list[ForkProcess] = []
    pipes = []
    try:
        with _interrupt_later():
            for _ in range(count):
                with _enough(count):
                    here, there = multiprocessing.Pipe()
                    pipes.append(here)
                    # A daemon, so that it is ended at exit whatever happens here.
                    process = ForkProcess(target=_work, args=(there, encoder), daemon=True)
                    process.start()
                processes.append(process)
                there.close()  # so that only the worker has it, and its end is the pipe's end
        yield pipes
    finally:
        with _interrupt_later():
            for process in processes:
                process.kill()  # it has nothing to lose: an unfinished part is written anew
            for process in processes:
                process.join()
        for pipe in pipes:
            pipe.close()


@contextmanager
def _enough(count: int) -> Iterator[None]:
    """A context that starts one of `count` workers. Raises DataError if the system has no room."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--workers {count}: {error.strerror}: give fewer, and the same command goes on"
        ) from error


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """A context at whose end a KeyboardInterrupt is raised if SIGINT came meanwhile.

    Within fork() it would be lost, since Python ignores what is raised in callbacks of fork().
    """
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _work(pipe: Connection, encoder: Encoder) -> None:
    """Encodes the blocks that come, until this process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        block = pipe.recv()
        try:
            result: Header | Exception = encoder.encode(block)
        except Exception as error:
            error.add_note(f"In a worker:\n{traceback.format_exc()}")
            result = error
        pipe.send(result)


def _end_with_parent() -> None:
    """Ends this process when the main process has ended, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
