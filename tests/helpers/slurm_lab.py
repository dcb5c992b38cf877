"""Slurm on the nodes of a lab: Debian's real munged and slurmd on each node, and slurmctld on the first one.

    n0  munged  slurmctld  slurmd
    n1  munged  slurmd

The nodes have no cgroups of their own, so slurm tracks ranks by their parent processes (proctrack/linuxproc).
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.helpers.node_lab import START_PATIENCE_SECONDS, Node
from tests.helpers.ssh_server import tool_path

TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
CPUS_OF_A_NODE = 4
"""The number in slurm's config, which slurm does not compare with the real one."""
CONFIG = """\
ClusterName=lab
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldTimeout=30
SlurmdTimeout=30
InactiveLimit=0
KillWait=5
NodeName={names} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@cache
def why_no_slurm() -> str:
    """Return the reason why slurm cannot be started in a lab, or an empty string."""
    missing = [package for tool, package in TOOLS.items() if not tool_path(tool)]
    return f"needs Debian's {', '.join(missing)}" if missing else ""


@contextmanager
def slurm_lab(folder: Path, nodes: list[Node]) -> Iterator[Path]:
    """Start slurm on nodes that are already started, and yield its slurm.conf, for SLURM_CONF."""
    key = _munge_key(folder)
    (folder / "state").mkdir()
    config = folder / "slurm.conf"
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 needs a mounted tree even if unused
    names = ",".join(node.name for node in nodes)
    config.write_text(CONFIG.format(folder=folder, first=nodes[0].name, names=names, cpus=CPUS_OF_A_NODE))
    daemons: list[subprocess.Popen[bytes]] = []

    def start(node: Node, tool: str, *options: str) -> None:
        log = (folder / f"{tool}_{node.name}.out").open("wb")
        command = node.command(tool_path(tool) or tool, *options)
        environment = {**os.environ, "SLURM_CONF": str(config)}
        daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment))

    try:
        for node in nodes:
            (folder / f"spool_{node.name}").mkdir()
            # --force: otherwise munged refuses to run as root, and to have its socket in a shared folder.
            own = ("--socket=/run/munge.socket", "--pid-file=/run/munged.pid", "--seed-file=/run/munged.seed")
            start(node, "munged", "--foreground", "--force", f"--key-file={key}", *own)
        start(nodes[0], "slurmctld", "-D")
        for node in nodes:
            start(node, "slurmd", "-D")
        _wait_for_idle(nodes, config, daemons)
        yield config
    finally:
        for daemon in reversed(daemons):
            _end(daemon)
        shutil.rmtree(key.parent, ignore_errors=True)


def _munge_key(folder: Path) -> Path:
    place = folder / "munge"
    place.mkdir(mode=0o700)
    key = place / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    return key


def _wait_for_idle(nodes: list[Node], config: Path, daemons: list["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + START_PATIENCE_SECONDS
    while True:
        said = nodes[0].run("sinfo", "--noheader", "--Node", "--format=%T", environment={"SLURM_CONF": str(config)})
        if said.stdout.split() == ["idle"] * len(nodes):
            return
        words = "\n".join(path.read_text()[-2000:] for path in sorted(config.parent.glob("*.out")))
        assert all(daemon.poll() is None for daemon in daemons), words
        assert time.monotonic() < deadline, f"{said.stdout}{said.stderr}\n{words}"
        time.sleep(0.1)


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    """End a daemon through nsenter's child, because nsenter forwards no signals; the node ends what is left."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
    try:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGTERM)
        daemon.wait(timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        daemon.kill()
        daemon.wait()
