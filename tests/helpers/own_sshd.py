"""A real sshd for tests on a free port of this machine, and an `ssh` command that knows it as the host `far`.

The user's ~/.ssh is not used: a wrapper `ssh` at the front of PATH calls the real one with another config file.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers.ssh_server import make_key, sshd_config, tool_path

START_PATIENCE_SECONDS = 20.0
SSH_CONFIG = """\
Host far
    HostName 127.0.0.1
    Port {port}
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


def why_no_sshd() -> str:
    """Return the reason why no sshd can be started, or an empty string."""
    needed = {"sshd": "openssh-server", "ssh": "openssh-client"}
    missing = [package for tool, package in needed.items() if not tool_path(tool)]
    return f"needs Debian's {', '.join(missing)}" if missing else ""


@dataclass
class OwnSshd:
    """An sshd that can be started and stopped repeatedly."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def path_variable(self) -> str:
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def start(self) -> None:
        command = [tool_path("sshd") or "sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        deadline = time.monotonic() + START_PATIENCE_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, self.log()
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Kill sshd and all its connections, as if the machine went down."""
        if self.process is not None:
            self.cut()
            self.process.kill()
            self.process.wait()
            self.process = None

    def cut(self) -> None:
        """Kill the open connections, but not sshd itself."""
        for child in self._sessions():
            try:
                child.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue

    def has_session(self) -> bool:
        return bool(self._sessions())

    def _sessions(self) -> "list[psutil.Process]":
        return psutil.Process(self.process.pid).children(recursive=True) if self.process else []

    def log(self) -> str:
        return (self.folder / "sshd.log").read_text()


def _lasting_port() -> int:
    """Return a free port that the kernel does not assign to outgoing connections, so that sshd can reuse it."""
    while True:
        with socket.socket() as free, suppress(OSError):
            port = random.randrange(20_000, 32_000)
            free.bind(("127.0.0.1", port))
            return port


@contextmanager
def own_sshd(folder: Path) -> Iterator[OwnSshd]:
    """Yield a started sshd with matching keys, and stop it with all its connections afterwards."""
    for name in ("host_key", "key"):
        make_key(folder / name)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    port = _lasting_port()
    host_key = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
    listen = "ListenAddress 127.0.0.1"
    (folder / "sshd_config").write_text(sshd_config(port, folder / "host_key", folder / "authorized_keys", listen))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(port=port, folder=folder))
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    if os.geteuid() == 0:
        # Required by sshd. It is not removed: other tests may be using it at the same time.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    server = OwnSshd(folder, port)
    try:
        server.start()
        yield server
    finally:
        server.stop()
