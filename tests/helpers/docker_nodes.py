"""Nodes as compose.host_network.yaml starts them, but without a docker engine.

Each runs the real entrypoint.sh under tini, with its own processes and mounts and with the machine's network.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tests.helpers.docker_files import DOCKER, ROOT
from tests.helpers.ssh_server import login_ssh_folder
from z2all_ds.base.machine import free_port

TOOLS = {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "tini": "tini", "unshare": "util-linux"}
ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SET_UP = """\
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o size=256m tmpfs /dev/shm
exec tini -g -- bash {entrypoint}
"""
START_PATIENCE_SECONDS = 20.0


@cache
def why_no_nodes() -> str:
    """Return the reason why no nodes can be started, or an empty string."""
    missing = [package for tool, package in TOOLS.items() if not shutil.which(tool)]
    if missing:
        return f"needs Debian's {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    tried = subprocess.run([*ISOLATED, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True, text=True)
    return f"namespaces are not allowed here ({tried.stderr.strip()})" if tried.returncode else ""


@dataclass(frozen=True)
class DockerNode:
    """A node whose sshd answers."""

    port: int
    folder: Path
    key: Path

    def ssh(self, command: str, *options: str, key: Path | None = None) -> "subprocess.CompletedProcess[str]":
        own = (
            "-F",
            "none",
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=accept-new",
            "-o",
            "IdentitiesOnly=yes",
        )
        known = (
            "-o",
            f"UserKnownHostsFile={self.folder}/known_hosts",
            "-i",
            str(key or self.key),
            "-p",
            str(self.port),
        )
        words = ["ssh", *options, *own, *known, "root@127.0.0.1", command]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)

    @property
    def config(self) -> str:
        return self.ssh("cat /run/z2all/sshd_config").stdout


def settings(folder: Path, port: int, authorized: Path) -> dict[str, str]:
    """Return the environment of a node: files that a container mounts are in folders of the test."""
    return {
        "PATH": os.environ["PATH"],
        "Z2ALL_SSH_PORT": str(port),
        "Z2ALL_SSH_ADDRESS": "127.0.0.1",
        "Z2ALL_AUTHORIZED_KEYS": str(authorized),
        "Z2ALL_HOST_KEYS": str(folder / "host_keys"),
    }


@contextmanager
def docker_node(folder: Path, port: int, key: Path, **variables: str) -> Iterator[DockerNode]:
    """Yield a started node, and kill it afterwards; `variables` are set as by a compose file."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    script = SET_UP.format(entrypoint=DOCKER / "entrypoint.sh")
    environment = {**settings(folder, port, key.with_name(key.name + ".pub")), **variables}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*ISOLATED, "bash", "-c", script], env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + START_PATIENCE_SECONDS
        while not _answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield DockerNode(port, folder, key)
    finally:
        process.kill()  # also kills everything in its namespace
        process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


# Both nodes of the shipped hostfile


@contextmanager
def both_nodes(folder: Path, key: Path) -> Iterator[Path]:
    """Start the nodes of the shipped hostfile, and yield a copy of it with another key, interpreter and free ports."""
    content = yaml.safe_load((DOCKER / "host_network.yaml").read_text(encoding="utf-8"))
    content["all"]["ssh"]["key"] = str(key)
    content["all"]["python"] = sys.executable
    ports = [free_port(), free_port()]
    for (name, said), port in zip(content["nodes"].items(), ports, strict=True):
        said["ssh"]["port"] = port
        # NCCL takes them for two machines; otherwise it refuses two ranks on one GPU.
        said["environment"] = {"NCCL_HOSTID": name}
    hostfile = folder / "nodes.yaml"
    hostfile.write_text(yaml.safe_dump(content, sort_keys=False))
    with docker_node(folder / "1", ports[0], key), docker_node(folder / "2", ports[1], key):
        yield hostfile


@contextmanager
def z2all_beside(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """Yield a running `z2all` with its own empty ~/.ssh, as in the service `launch`, so that no host key is kept."""
    with login_ssh_folder() as home:
        script = f'mount --make-rprivate /; mount -t tmpfs tmpfs "{home}"; exec "$@"'
        command = ["unshare", "--mount", "bash", "-c", script, "bash", sys.executable, "-m", "z2all_ds", *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def z2all(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run `z2all` to its end, and return the result."""
    with z2all_beside(*words) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)
