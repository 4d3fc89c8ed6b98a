"""Measures times: of GPU work, and of calls by the clock of the host."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

BUSY = 50_000_000  # GPU cycles, some 30 ms: more than the host takes to launch three linears


def medians(
    calls: Mapping[str, Callable[[], Any]],
    each: int = 10,
    rounds: int = 15,
    eager: Collection[str] = (),
) -> dict[str, float]:
    """The median time of each call in seconds.

    Each call is captured `each` times in a CUDA graph, which leaves out host overhead. The graphs
    of all calls are replayed `rounds` times, each time in another order, so that changes in the
    GPU's speed affect all of them alike. The order counts: a GPU near its power limit is slower
    after a call that took much power than after one that took little.

    eager: the names of calls that cannot be captured. The host launches their kernels while the GPU
    is busy, so that its time is left out here too, but for calls that wait for the GPU.
    """
    repeats: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        repeats[name] = partial(_repeat, call, each)
        if name not in eager:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                repeats[name]()
            repeats[name] = graph.replay
    taken: dict[str, list[float]] = {name: [] for name in calls}
    orders = random.Random(0)
    for _ in range(rounds):
        for name in orders.sample(list(calls), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if name in eager:
                torch.cuda._sleep(BUSY)
            start.record()
            repeats[name]()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(end) / 1e3 / each)
    return {name: statistics.median(found) for name, found in taken.items()}


def host_medians(
    calls: Mapping[str, Callable[[], None]],
    each: int = 20,
    rounds: int = 25,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The median time of each call in seconds, by the clock of the host.

    For calls that take the host longer than the GPU. They are made `each` times in turn, `rounds`
    times, and the GPU, if there is one, is waited for before and after. after_round: is called
    after each round, outside of the measured time. Warm the calls up first.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            _wait()
            start = time.perf_counter()
            _repeat(call, each)
            _wait()
            taken[name].append((time.perf_counter() - start) / each)
        after_round()
    return {name: statistics.median(found) for name, found in taken.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()
