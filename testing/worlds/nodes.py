"""Two machines of a cluster on one: each has a network, a host name and an /etc/hosts of its own.

They share the file system and the processes of this machine. This takes Linux's namespaces, and
root.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = {"n1": "10.77.0.1", "n2": "10.77.0.2"}
_START = 'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && exec sleep infinity'


@dataclass(frozen=True)
class Node:
    name: str  # its host name
    address: str  # on the interface eth0, by which the other node reaches it
    holder: int  # the process that holds its namespaces

    def popen(
        self, *command: str | Path, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the node. Its output is appended to the file `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._enter(), *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def run(
        self, *command: str | Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the node; returns its status and its output."""
        return subprocess.run(
            [*self._enter(), *command], env=environment, capture_output=True, text=True, timeout=120
        )

    def _enter(self) -> list[str]:
        enter = ["nsenter", "--target", str(self.holder), "--net", "--uts", "--mount"]
        return [*enter, "env", f"--chdir={Path.cwd()}"]


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Returns once `condition()` is true. Raises TimeoutError with `what` after timeout_s."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(0.2)


def missing() -> str | None:
    """Why this machine cannot have nodes of its own; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "nsenter", "hostname"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    for words in (["unshare", "--net", "--uts", "--mount", "true"], _veth("add"), _veth("del")):
        tried = subprocess.run(words, capture_output=True, text=True)
        if tried.returncode:
            return f"{' '.join(words)}: {tried.stderr.strip()}"
    return None


def _veth(action: str) -> list[str]:
    link = ["ip", "link", action, f"try{os.getpid()}"]
    return (
        [*link, "type", "veth", "peer", "name", f"peer{os.getpid()}"] if action == "add" else link
    )


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that are connected by their interfaces eth0, until the context ends.

    folder: where their hosts file is written.
    """
    hosts = folder / "hosts"
    names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    hosts.write_text(f"127.0.0.1 localhost\n{names}")
    with ExitStack() as stack:
        first, second = (
            Node(name, address, stack.enter_context(_holder(name, hosts)))
            for name, address in ADDRESSES.items()
        )
        link = ["ip", "link", "add", "eth0", "netns", str(first.holder), "type", "veth"]
        subprocess.run([*link, "peer", "eth0", "netns", str(second.holder)], check=True)
        for node in (first, second):
            for words in (f"address add {node.address}/24 dev eth0", "link set eth0 up"):
                done = node.run("ip", *words.split())
                assert done.returncode == 0, done.stderr
        yield first, second


@contextmanager
def _holder(name: str, hosts: Path) -> Iterator[int]:
    """A process in namespaces of its own, with a host name and a hosts file; its id."""
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _START, "sh", str(hosts), name]
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: _runs(process.pid, "sleep"), 30, f"the node {name} to start")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _runs(pid: int, program: str) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == program
