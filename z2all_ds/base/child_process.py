"""Child processes: starts them, ends them with all that they have started, and exchanges JSON lines with them.

A child has its own session, so that Ctrl-C reaches only us; we then end its whole group. If we are killed, an owned
child ends by itself (`parent_watch.py`).

A message is a JSON object on one line after MARK. Other lines on the same stream, of a login shell or of a library, are
skipped.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from z2all_ds.base.atomic import open_own
from z2all_ds.base.console import printable
from z2all_ds.base.json_text import load_json
from z2all_ds.base.machine import group_is_alive
from z2all_ds.base.parent_watch import OWNER_VARIABLE, follow_owner, owner_mark

GRACE_SECONDS = 8.0
"""Between SIGTERM and SIGKILL, and the longest wait for SIGKILL to take effect."""
LAST_LINES_SECONDS = 1.0
LINES_KEPT = 40
MARK = "z2all: "
PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
"""Options of `start`."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Python 3.11 and later: the current folder is not on sys.path."""

# Start


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def package_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment with which a Python child finds this package, but imports nothing from its current folder.

    Others may be able to write to that folder. An empty part of PYTHONPATH stands for it, too, and is left out.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    checkout = checkout_folder()
    if checkout and checkout not in paths:
        paths.insert(0, checkout)
    return {SAFE_PATH: "1", **environment, "PYTHONPATH": os.pathsep.join(paths)}


def checkout_folder() -> str | None:
    """Return the folder that contains this package, None where it is installed: every Python finds it there."""
    folder = Path(__file__).resolve().parents[2]
    return None if folder.name in ("site-packages", "dist-packages") else str(folder)


def start(
    command: Sequence[str], environment: Mapping[str, str] = os.environ, *, is_owned: bool = True, **options: Any
) -> "subprocess.Popen[Any]":
    """Start a command in a new session and with an empty stdin, unless `options` (those of Popen) say otherwise.

    The environment is that of `package_environment`; for an owned child it names us as its owner.
    """
    owner = {OWNER_VARIABLE: owner_mark()} if is_owned else {}
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
    return subprocess.Popen(command, env={**package_environment(environment), **owner}, **options)


def run_group(
    command: list[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    stderr_to_log: bool = False,
    grace_seconds: float = GRACE_SECONDS,
) -> int:
    """Run a command to its end and return its exit code; stdout goes to `log`, stderr too or to our own.

    Then end what it has started and left, with `grace_seconds` between SIGTERM and SIGKILL.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb", opener=open_own) as file:
        process = start(command, environment, stdout=file, stderr=subprocess.STDOUT if stderr_to_log else None)
        try:
            return process.wait()
        finally:
            end_group(process, grace_seconds)


def owned(command: list[str]) -> list[str]:
    """Return a command that runs another one and ends its group when the owner is gone.

    It is for programs that do not watch their owner: DeepSpeed's runner and what it starts (pdsh, mpirun, srun). The
    processes below it, here and on other machines, have no owner.
    """
    return module_command("z2all_ds.base.child_process", *command)


def run_owned(command: list[str]) -> int:
    """Run a command in our group, pass SIGTERM on to it and return its exit code, as a shell gives it."""
    follow_owner()
    os.environ.pop(OWNER_VARIABLE, None)
    process: subprocess.Popen[bytes] | None = None
    is_asked_to_end = False

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal is_asked_to_end
        is_asked_to_end = True
        if process:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    process = start(command, is_owned=False, start_new_session=False)
    if is_asked_to_end:
        process.terminate()
    code = process.wait()
    return code if code >= 0 else 128 - code


# End


def end_group(process: "subprocess.Popen[Any]", grace_seconds: float = GRACE_SECONDS) -> None:
    """End all processes of a child's session and wait for it; a second Ctrl-C skips the grace."""
    end_group_of(process.pid, grace_seconds)
    process.wait()


def end_group_of(leader: int, grace_seconds: float = GRACE_SECONDS) -> None:
    """End all processes of a group, also after the end of its leader, which need not be a child of ours."""
    try:
        _signal_group(leader, signal.SIGTERM, grace_seconds)
    finally:
        _signal_group(leader, signal.SIGKILL, GRACE_SECONDS)


def _signal_group(group: int, number: signal.Signals, patience_seconds: float) -> None:
    """Send the signal and wait for its effect: after SIGKILL, too, a process lives on for some milliseconds."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
    deadline = time.monotonic() + patience_seconds
    while group_is_alive(group) and time.monotonic() < deadline:
        time.sleep(0.02)


# JSON lines


def write_message(stream: IO[str], message: Mapping[str, Any]) -> None:
    """Write a message as one line and flush it."""
    stream.write(f"{MARK}{json.dumps(message)}\n")
    stream.flush()


def read_messages(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream until its end."""
    return (message for line in stream if (message := _message(line, MARK)) is not None)


def _message(line: str, mark: str) -> dict[str, Any] | None:
    """Return what a line carries, None where it is no message."""
    try:
        found = load_json(line.removeprefix(mark)) if line.startswith(mark) else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class JsonProcess:
    """A child that reads messages from its stdin and writes messages to its stdout; the end of its stderr is kept."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        *,
        error_mark: str = MARK,
        shows_errors: bool = False,
    ) -> None:
        """`error_mark`: that of messages on its stderr, "" where a library writes plain JSON objects there.

        `shows_errors`: other lines of its stderr go to ours as they come.
        """
        self.process = start(command, environment, **PIPES, text=True, encoding="utf-8", errors="replace")
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin and stdout and stderr
        self._stdin: IO[str] = stdin
        self.error_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sending = threading.Lock()
        self._error_mark, self._shows_errors = error_mark, shows_errors
        self._listeners = [
            threading.Thread(target=self._hear, args=(stdout,), daemon=True),
            threading.Thread(target=self._hear_errors, args=(stderr,), daemon=True),
        ]
        for thread in self._listeners:
            thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Do nothing after the child's end, which `receive` shows."""
        with self._sending, suppress(OSError, ValueError):
            write_message(self._stdin, message)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message, None after the last one. Raise TimeoutError where none comes in time."""
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if message is None:
            self._inbox.put(None)  # for the next call
        return message

    def wait(self) -> int:
        """Wait for the child's end and its last lines; return its exit code."""
        code = self.process.wait()
        for thread in self._listeners:
            thread.join(LAST_LINES_SECONDS)
        return code

    def close(self, grace_seconds: float = 0.0) -> None:
        """Ask the child to end by closing its stdin, and kill it with all that it has started after the grace."""
        with suppress(OSError):
            self._stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _hear(self, stream: IO[str]) -> None:
        with stream:
            for message in read_messages(stream):
                self._inbox.put(message)
        self._inbox.put(None)

    def _hear_errors(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                message = _message(line, self._error_mark)
                if message is not None:
                    self._inbox.put(message)
                    continue
                if line.strip():
                    self.error_lines.append(line.strip())
                if self._shows_errors:
                    with suppress(OSError):
                        sys.stderr.write(printable(line))  # of another machine, perhaps
                        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(run_owned(sys.argv[1:]))
