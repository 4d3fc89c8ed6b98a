"""Worker processes that tokenize blocks, several at a time and in their order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from megatron_fp4.mcore.data.corpus.blocks import Block
from megatron_fp4.mcore.data.corpus.encoding import Encoder
from megatron_fp4.mcore.data.corpus.parts import Header
from megatron_fp4.mcore.data.errors import DataError

_BLOCKS_PER_WORKER = 2  # read ahead, so that no worker waits; this bounds the memory of all blocks
_encoder: Encoder  # of a worker process


def encoded(blocks: Iterator[Block], encoder: Encoder, workers: int) -> Generator[Header]:
    """The headers of the parts that `workers` processes write for `blocks`, in their order.

    Raises what Encoder.encode raises for the first block that fails, and DataError if a worker is
    killed.
    """
    waiting: deque[Future[Header]] = deque()
    with _pool(encoder, workers) as pool:
        for block in blocks:
            waiting.append(pool.submit(_encode, block))
            if len(waiting) >= _BLOCKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _pool(encoder: Encoder, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Workers, which are ended at once if the context ends by an exception.

    They are forked, so that they share the memory of the tokenizer.
    """
    others = set(multiprocessing.active_children())
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, fork, initializer=_start, initargs=(encoder,))
    try:
        yield pool
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                "a worker was killed, perhaps since memory ran out: give the same command with "
                "fewer --workers, and it goes on"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the main process has ended, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> Header:
    return _encoder.encode(block)
