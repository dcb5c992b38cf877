"""Run folders on other machines, read over ssh with the user's own config and keys.

One ssh a place: it starts a bare Python there with the text of `far_side`, which answers requests until the board is
gone. A connection that breaks is made again, after pauses that grow; until then calls say why it cannot be had.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from z2all_ds.base.child_process import PIPES, start
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.ssh_errors import recognise
from z2all_ds.track.board import remote_agent
from z2all_ds.track.board.files import Unreachable

GREETING = b"z2all board\n"
GREETING_SECONDS = 20.0
"""From ssh's start to our side's first word; ssh itself gives up a machine that does not answer after 10."""
LAST_WORDS_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a shared connection would outlive the board
}
NO_PYTHON = 127
FIXES = {
    "host_key": "See who answers there with `ssh {target}` by hand",
    "key": "`ssh {target}` must come in without a password (ssh-copy-id, ssh-agent)",
    "key_file": "`ssh {target}` must come in without a password (ssh-copy-id, ssh-agent)",
    "name": "Correct the name, or give it in ~/.ssh/config",
    "port": "No sshd answers there: ssh://user@host:port/path names another port",
    "unreachable": "Is the machine up and reached from here?",
}


@dataclass(frozen=True)
class RemoteRunPath:
    """Where a folder is."""

    target: str
    """user@host, or a name from ~/.ssh/config."""
    port: int | None
    folder: str

    def command(self) -> list[str]:
        """ssh, with what starts our side there."""
        source_bytes = len(_source())
        python = f"import sys; exec(compile(sys.stdin.buffer.read({source_bytes}), 'board', 'exec'))"
        there = f"command -v python3 >/dev/null || exit {NO_PYTHON}; exec python3 -c {shlex.quote(python)}"
        options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
        port = ["-p", str(self.port)] if self.port else []
        return ["ssh", "-C", "-T", "-x", *options, *port, "--", self.target, f"exec sh -c {shlex.quote(there)}"]


def parse_place(given: str) -> RemoteRunPath | None:
    """user@host:path or ssh://user@host:port/path; None for a folder on this machine."""
    if given.startswith("ssh://"):
        try:
            parts = urlsplit(given)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(given, f"{error}", "Write ssh://user@host:port/path.") from None
        folder = unquote(parts.path)
        if not host or not folder.strip("/"):
            raise ConfigError(given, "names no host or no folder", "Write ssh://user@host:port/path.")
        target = f"{unquote(parts.username)}@{host}" if parts.username else host
        place = RemoteRunPath(target, port, "~" + folder[2:] if folder.startswith("/~") else folder)
    else:
        # As scp reads it: a colon before any slash. What is there under that very name is a folder here.
        found = re.fullmatch(r"([^/:\[\]]+|(?:[^/@]+@)?\[[^\]/]+\]):(.*)", given, flags=re.DOTALL)
        if found is None or Path(given).exists():
            return None
        place = RemoteRunPath(found[1].replace("[", "").replace("]", ""), None, found[2] or ".")
    if place.target.startswith("-"):
        raise ConfigError(given, "a host's name does not begin with -", "Write user@host:path.")
    return RemoteRunPath(place.target, place.port, place.folder.rstrip("/") or "/")


def _source() -> bytes:
    return Path(remote_agent.__file__).read_bytes().replace(b'if __name__ == "__main__":', b"if True:")


class RemoteFiles:
    """The other machine's files; one request at a time."""

    is_far = True

    def __init__(self, place: RemoteRunPath) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._ssh: subprocess.Popen[bytes] | None = None
        self._said: list[bytes] = []
        self._listener: threading.Thread | None = None
        self._trouble = ""
        self._pause_seconds, self._not_before = FIRST_PAUSE_SECONDS, 0.0
        self._is_closed, self._gave_up = False, False

    def signs(self, paths: list[str]) -> tuple[float, list[list[float]]]:
        answer = json.loads(self._ask({"ask": "signs", "paths": paths})[0])
        return answer["now"], answer["signs"]

    def read(self, path: str, offset: int, length: int) -> bytes:
        return self._ask({"ask": "read", "path": path, "offset": offset, "length": length})[0]

    def lines_at(self, path: str, offsets: list[int]) -> list[tuple[int, bytes]]:
        return _lines(self._ask({"ask": "lines_at", "path": path, "offsets": offsets}))

    def lines_with(self, path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]:
        request = {"ask": "lines_with", "path": path, "words": words, "offset": offset, "length": length}
        return _lines(self._ask(request))

    def run_folders(self, path: str) -> list[str]:
        folders: list[str] = json.loads(self._ask({"ask": "run_folders", "path": path})[0])
        return folders

    def file_names(self, path: str) -> list[str]:
        names: list[str] = json.loads(self._ask({"ask": "file_names", "path": path})[0])
        return names

    def close(self) -> None:
        """Ends ssh, and with it what runs there."""
        self._is_closed = True
        ssh = self._ssh
        if ssh is not None and ssh.poll() is None:
            ssh.terminate()

    def _ask(self, request: dict[str, Any]) -> list[bytes]:
        with self._lock:
            ssh = self._connected()
            try:
                return self._exchange(ssh, request)
            except (BrokenPipeError, EOFError, ValueError):
                raise self._lost(ssh) from None

    def _exchange(self, ssh: "subprocess.Popen[bytes]", request: dict[str, Any]) -> list[bytes]:
        assert ssh.stdin and ssh.stdout
        ssh.stdin.write(json.dumps(request).encode() + b"\n")
        ssh.stdin.flush()
        head = json.loads(ssh.stdout.readline())
        if "error" in head:
            raise OSError(head["error"])
        pieces = [ssh.stdout.read(size) for size in head["sizes"]]
        if [len(piece) for piece in pieces] != head["sizes"]:
            raise EOFError
        return pieces

    def _connected(self) -> "subprocess.Popen[bytes]":
        if self._ssh is not None:
            return self._ssh
        if self._is_closed or time.monotonic() < self._not_before:
            raise Unreachable(self._trouble)
        try:
            ssh = start(self._place.command(), {**os.environ, "LC_ALL": "C"}, **PIPES)  # words that we know to read
        except FileNotFoundError:
            raise Unreachable("ssh is not installed here: install openssh-client") from None
        self._ssh, self._said, self._gave_up = ssh, [], False
        self._listener = threading.Thread(target=_listen, args=[ssh, self._said], daemon=True)
        self._listener.start()
        assert ssh.stdin and ssh.stdout
        limit = threading.Timer(GREETING_SECONDS, self._give_up, args=[ssh])
        limit.daemon = True
        limit.start()
        try:
            ssh.stdin.write(_source())
            ssh.stdin.flush()
            # A login that greets people may say something first.
            greeted = any(line.endswith(GREETING) for line in iter(ssh.stdout.readline, b""))
        except BrokenPipeError:
            greeted = False
        finally:
            limit.cancel()
        if not greeted:
            raise self._lost(ssh)
        self._pause_seconds = FIRST_PAUSE_SECONDS
        return ssh

    def _give_up(self, ssh: "subprocess.Popen[bytes]") -> None:
        self._gave_up = True
        with suppress(ProcessLookupError):
            os.killpg(ssh.pid, signal.SIGKILL)  # with what it has started: that would hold our pipe open

    def _lost(self, ssh: "subprocess.Popen[bytes]") -> Unreachable:
        """Why there is no connection, after ssh's end."""
        try:
            code = ssh.wait(LAST_WORDS_SECONDS)  # of its own accord, or its code says nothing
        except subprocess.TimeoutExpired:
            ssh.kill()
            code = ssh.wait()
        self._ssh = None
        if self._listener is not None:
            self._listener.join(LAST_WORDS_SECONDS)
        said = b"".join(self._said).decode(errors="replace")
        self._trouble = no_greeting(self._place) if self._gave_up else trouble_of(self._place, code, said)
        self._not_before = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * self._pause_seconds)
        return Unreachable(self._trouble)


def _listen(ssh: "subprocess.Popen[bytes]", said: list[bytes]) -> None:
    """Keeps ssh's last words, so that its stderr never fills up."""
    assert ssh.stderr
    for line in ssh.stderr:
        said.append(line)
        del said[:-20]


def _lines(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    return list(zip(json.loads(pieces[0]), pieces[1:], strict=True))


def no_greeting(place: RemoteRunPath) -> str:
    """Of a login that takes us in and then gets no further."""
    fix = f"`ssh {place.target} python3 -V` by hand shows where it stops"
    return f"{place.target}: the login did not get to python3 within {GREETING_SECONDS:.0f} s. {fix}"


def trouble_of(place: RemoteRunPath, code: int, stderr: str) -> str:
    """ssh's own line and what to do about it."""
    if code == NO_PYTHON:
        return f"{place.target}: there is no python3 on its PATH, which the board needs to read the run there"
    kind, line = recognise(stderr)
    if kind in FIXES:
        return f"{line}. {FIXES[kind].format(target=place.target)}"
    return line or f"the connection to {place.target} has ended"
