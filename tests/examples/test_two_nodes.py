"""examples/launch.sh on two nodes, each with a network and a host name of its own."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from testing.examples import LAUNCH, SMALL, losses, settings
from testing.worlds import nodes
from testing.worlds.nodes import Node

pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU"),
]
STEPS = 8


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    reason = nodes.missing()
    if reason is not None:
        pytest.skip(reason)
    with nodes.two_nodes(tmp_path) as made:
        yield made


def test_two_nodes_meet_and_train_as_one_node_does(tmp_path: Path, two: tuple[Node, Node]) -> None:
    """The node that hosts the meeting starts last. Ranks on two nodes compute what two ranks
    of one node compute, and their gradients travel between the nodes."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    first, second = two
    train({"alone": (first, {"GPUS_PER_NODE": 2})}, alone)
    common = {"NODES": 2, "RENDEZVOUS": f"{first.name}:29400", "RUN_ID": "test", "GPUS_PER_NODE": 1}
    common["GLOO_SOCKET_IFNAME"] = "eth0"
    before = received(second)
    train(
        {
            name: (node, common | {"NODE_RANK": rank, "NODE_ADDRESS": node.name})
            for rank, name, node in ((1, "second", second), (0, "first", first))
        },
        together,
    )
    log = together / "both"
    log.write_text("".join((together / name).read_text() for name in ("first", "second")))
    assert len(losses(log)) == STEPS and losses(log) == losses(alone / "alone")
    # Each step a rank of two receives half of the FP32 gradients of more than 40,000 parameters.
    assert received(second) - before > STEPS * 40_000 / 2 * 4


def train(launches: dict[str, tuple[Node, dict[str, object]]], run: Path) -> None:
    """Runs examples/launch.sh on nodes at the same time; run/NAME is the log of launch NAME."""
    run.mkdir()
    with ExitStack() as stack:
        started = []
        for name, (node, variables) in launches.items():
            own = os.environ | settings(run, TRAIN_ITERS=STEPS, **variables)
            process = node.popen(LAUNCH, "gpt_345m", *SMALL, log=run / name, environment=own)
            stack.callback(process.kill)
            started.append((name, process))
        for name, process in started:
            assert process.wait(timeout=180) == 0, (run / name).read_text()[-4000:]


def received(node: Node) -> int:
    """The bytes that have reached the node's interface."""
    return int(re.findall(r"eth0: *(\d+)", node.run("cat", "/proc/net/dev").stdout)[0])
