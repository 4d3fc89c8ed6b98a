"""Times of GPU work, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch


def medians(
    calls: Mapping[str, Callable[[], Any]], each: int = 10, rounds: int = 15
) -> dict[str, float]:
    """Median seconds of each call. Graphs of several calls take turns, so that starting them costs
    nothing and all meet the same machine."""
    graphs = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(each):
                call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(start.elapsed_time(end) / 1e3 / each)
    return {name: statistics.median(found) for name, found in taken.items()}
