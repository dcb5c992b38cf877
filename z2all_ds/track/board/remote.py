"""Run folders on other machines, read over ssh with the user's own config and keys.

There is one ssh process per given folder. It starts a bare Python on the other machine with the text of
`track/files.py`, which answers requests until the board ends. A lost connection is opened again, after increasing
pauses; until then, calls raise an error with the reason.
"""

import os
import re
import shlex
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from z2all_ds.base.child_process import MARK, JsonProcess
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.ssh_errors import recognise
from z2all_ds.base.url_passwords import without_passwords
from z2all_ds.track import files
from z2all_ds.track.files import Files

LOGIN_SECONDS = 20.0
"""From the start of ssh to the first answer; ssh itself gives up on an unreachable machine after 10."""
END_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a shared connection would outlive the board
}
NO_PYTHON = 127
START_AGENT = f"import json, sys; exec(json.loads(sys.stdin.readline()[{len(MARK)}:])['source'])"
LOGIN_FIX = "`ssh {target}` must log in without a password (ssh-copy-id, ssh-agent)"
FIXES = {
    "host_key": "Check the host key with `ssh {target}`",
    "key": LOGIN_FIX,
    "key_file": LOGIN_FIX,
    "name": "Correct the name, or define it in ~/.ssh/config",
    "port": "No sshd listens on this port; give another one with ssh://user@host:port/path",
    "unreachable": "Check that the machine is up and reachable from here",
}


class Unreachable(OSError):
    """The other machine does not answer now; the message is one line."""


@dataclass(frozen=True)
class RemoteFolder:
    """A folder on another machine."""

    target: str
    """user@host, or a name from ~/.ssh/config."""
    port: int | None
    folder: str

    def command(self) -> list[str]:
        """Return the ssh command that starts Python there; it expects its source as the first message."""
        agent = f"command -v python3 >/dev/null || exit {NO_PYTHON}; exec python3 -c {shlex.quote(START_AGENT)}"
        options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
        port = ["-p", str(self.port)] if self.port else []
        return ["ssh", "-C", "-T", "-x", *options, *port, "--", self.target, f"exec sh -c {shlex.quote(agent)}"]

    def reason(self, exit_code: int, error_lines: str) -> str:
        """Return ssh's own error line and its fix."""
        if exit_code == NO_PYTHON:
            return f"{self.target}: no python3 on its PATH; the board needs it to read the run there"
        kind, line = recognise(error_lines)
        if kind in FIXES:
            return f"{line}. {FIXES[kind].format(target=self.target)}"
        return line or f"the connection to {self.target} has ended"


def parse_remote(given: str) -> RemoteFolder | None:
    """Parse user@host:path or ssh://user@host:port/path; return None for a folder on this machine."""
    if given.startswith("ssh://"):
        try:
            parts = urlsplit(given)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(without_passwords(given), f"{error}", "Write ssh://user@host:port/path.") from None
        folder = unquote(parts.path)
        if parts.password is not None:
            shown, rule = without_passwords(given), "a password on the command line is visible to all users"
            raise ConfigError(shown, rule, "Leave it out; log in with a key (ssh-copy-id, ssh-agent).")
        if not host or not folder.strip("/"):
            raise ConfigError(given, "names no host or no folder", "Write ssh://user@host:port/path.")
        target = f"{unquote(parts.username)}@{host}" if parts.username else host
        folder = "~" + folder[2:] if folder.startswith("/~") else folder
    elif re.match(r"[A-Za-z][\w+.-]*://", given):
        rule = "the board reads folders of this machine, and of others over ssh"
        raise ConfigError(given, rule, "Give a path, or write ssh://user@host:port/path.")
    else:
        # As in scp: a colon before any slash, unless a local folder has that name.
        found = re.fullmatch(r"([^/:\[\]]+|(?:[^/@]+@)?\[[^\]/]+\]):(.*)", given, flags=re.DOTALL)
        if found is None or Path(given).exists():
            return None
        target, port, folder = found[1].replace("[", "").replace("]", ""), None, found[2] or "."
    if target.startswith("-"):
        raise ConfigError(given, "a host name does not begin with -", "Write user@host:path.")
    return RemoteFolder(target, port, folder.rstrip("/") or "/")


class RemoteFiles(Files):
    """Reads files of another machine; one request at a time."""

    is_remote = True

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ssh: JsonProcess | None = None
        self._reason, self._is_closed = "", False
        self._pause_seconds, self._not_before = FIRST_PAUSE_SECONDS, 0.0

    def stats(self, paths: list[str]) -> tuple[float, list[list[float]]]:
        now, found = self._call("stats", paths)
        return now, found

    def read(self, path: str, offset: int, length: int) -> bytes:
        return _as_bytes(self._call("read", path, offset, length))

    def lines_at(self, path: str, offsets: list[int]) -> list[tuple[int, bytes]]:
        return [(offset, _as_bytes(line)) for offset, line in self._call("lines_at", path, offsets)]

    def lines_with(self, path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]:
        found = self._call("lines_with", path, words, offset, length)
        return [(begin, _as_bytes(line)) for begin, line in found]

    def run_folders(self, path: str) -> list[str]:
        return list(self._call("run_folders", path))

    def file_names(self, path: str) -> list[str]:
        return list(self._call("file_names", path))

    def close(self) -> None:
        """End ssh, and with it the process on the other machine."""
        self._is_closed = True
        if self._ssh is not None:
            self._ssh.process.terminate()

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            ssh = self._ssh or self._connect()
            ssh.send({"method": method, "arguments": arguments})
            answer = ssh.receive()
            if answer is None:
                raise self._lost(ssh)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["result"]

    def _connect(self) -> JsonProcess:
        if self._is_closed or time.monotonic() < self._not_before:
            raise Unreachable(self._reason)
        try:
            # In English, since the error messages are parsed.
            ssh = JsonProcess(self._folder.command(), {**os.environ, "LC_ALL": "C"})
        except FileNotFoundError:
            raise Unreachable("ssh is not installed here: install openssh-client") from None
        self._ssh = ssh
        ssh.send({"source": Path(files.__file__).read_text(encoding="utf-8")})
        try:
            if ssh.receive(LOGIN_SECONDS) is None:
                raise self._lost(ssh)
        except TimeoutError:
            target, rule = self._folder.target, f"the login did not start python3 within {LOGIN_SECONDS:.0f} s"
            raise self._lost(ssh, f"{target}: {rule}. `ssh {target} python3 -V` shows where it stops") from None
        self._pause_seconds = FIRST_PAUSE_SECONDS
        return ssh

    def _lost(self, ssh: JsonProcess, reason: str = "") -> Unreachable:
        """End ssh and set the time of the next attempt; without a `reason`, its own error line is the reason."""
        ssh.close(0.0 if reason else END_SECONDS)
        exit_code = ssh.wait()
        self._ssh = None
        self._reason = reason or self._folder.reason(exit_code, "\n".join(ssh.error_lines))
        self._not_before = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * self._pause_seconds)
        return Unreachable(self._reason)


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
