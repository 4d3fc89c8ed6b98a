"""A Slurm cluster of two nodes on this machine, made of Debian's daemons."""

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing.worlds import nodes
from testing.worlds.launch import SCRIPTS
from testing.worlds.nodes import Node, wait_for

# No control groups and no accounting. cred_expire: Slurm holds a requeued job back for so many
# seconds. KillWait: the seconds between SIGTERM and SIGKILL at the time limit and for scancel.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost=n1({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
ReturnToService=2
KillWait=90
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    node: Node  # where commands are run
    environment: dict[str, str]

    def run(self, *command: str | Path) -> str:
        """The output of a command that has to succeed, such as sbatch."""
        done = self.node.run(*command, environment=self.environment)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str | Path) -> str:
        """The number of the job that `sbatch ARGUMENTS` submits."""
        return self.run("sbatch", "--parsable", *arguments).strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job, by Slurm's names: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", number)))


def missing() -> str | None:
    """Why this machine cannot have a cluster; None if it can. Installs Slurm if needed."""
    if (reason := nodes.missing()) is not None:
        return reason
    done = subprocess.run([SCRIPTS / "install_slurm.sh"], capture_output=True, text=True)
    if done.returncode:
        return f"Slurm cannot be installed: {(done.stdout + done.stderr).strip()[-300:]}"
    return None


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes, until the context ends.

    Slurm believes that a node has four CPUs and eight GPUs.
    folder: its configuration, state and logs; for the socket its path has to be short.
    """
    with ExitStack() as stack:
        first, second = stack.enter_context(nodes.two_nodes(folder))
        environment = os.environ | {"SLURM_CONF": str(_configure(folder, first, second))}
        key, socket = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

        def daemon(node: Node, *command: str | Path) -> None:
            log = folder / f"{Path(command[0]).name}-{node.name}.log"
            stack.enter_context(
                _until_the_end(node.popen(*command, log=log, environment=environment))
            )

        files = [f"--key-file={key}", f"--socket={socket}", f"--log-file={folder}/munged.log"]
        files += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
        daemon(first, "/usr/sbin/munged", "--foreground", "--force", *files)
        wait_for(socket.exists, 30, "munged")
        daemon(first, "/usr/sbin/slurmctld", "-D", "-i")
        for node in (first, second):
            daemon(node, "/usr/sbin/slurmd", "-D")
        made = Cluster(first, environment)
        wait_for(lambda: _idle_nodes(made) == 2, 60, f"two idle nodes, see {folder}")
        try:
            yield made
        finally:
            first.run("scancel", "--state", "RUNNING", environment=environment)
            first.run("scancel", "--state", "PENDING", environment=environment)


def _configure(folder: Path, *members: Node) -> Path:
    """Writes Slurm's configuration and makes its folders; returns the path of slurm.conf."""
    (folder / "state").mkdir()
    for number in range(8):  # devices that do what /dev/null does
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    lines = []
    for node in members:
        (folder / f"spool-{node.name}").mkdir()
        size = "CPUs=4 RealMemory=2000 Gres=gpu:8"
        lines.append(f"NodeName={node.name} NodeAddr={node.address} {size}")
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(folder=folder, address=members[0].address, nodes="\n".join(lines))
    )
    return configuration


def _idle_nodes(made: Cluster) -> int:
    done = made.node.run("sinfo", "-h", "-N", "-o", "%T", environment=made.environment)
    return done.stdout.split().count("idle")


@contextmanager
def _until_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
