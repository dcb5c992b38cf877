"""Rank 0's part of the sinks: starts a session per sink, prints its reports, and restarts it when it fails.

While the run trains, nothing here waits for a session or raises because of one.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from z2all_ds.base.atomic import open_own
from z2all_ds.base.child_process import module_command, package_environment, start
from z2all_ds.base.config.sections import TrackSection
from z2all_ds.base.machine import process_is_alive
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.records import Progress, RecordFollower
from z2all_ds.track.sinks.settings import HANG_SECONDS, LABELS, WANDB, SinkSettings, has_wandb_key, resolve_wandb_mode

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
REPORT_WAIT_AFTER_SECONDS = 2.0
KILL_SECONDS = 5.0
"""Longest wait for a killed process to end."""


class SinkProcess:
    """The session of one sink. `track sync` starts it once; `poll` restarts it when it fails."""

    def __init__(self, folder: RunFolder, sink: str, settings: SinkSettings, say: Callable[[str], None]) -> None:
        self._folder, self._sink, self._settings, self._say = folder, sink, settings, say
        self.label = LABELS[sink]
        self._process: subprocess.Popen[bytes] | None = None
        self._began_at = self._start_at = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._must_end = self._has_opened = self._has_warned = False
        self.is_over = False
        """Everything is delivered, or another attempt is useless."""

    def start(self) -> None:
        self._began_at, self._unread = time.monotonic(), b""
        self._services: list[tuple[int, int]] = []
        """Processes that the session has started, with their start times."""
        self._outcome: dict[str, Any] | None = None
        settings = json.dumps(asdict(self._settings))
        arguments = (str(self._folder.root.absolute()), self._sink, str(os.getpid()), settings)
        path = self._folder.root / "logs" / "sinks.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", opener=open_own) as log:
            self._process = start(
                module_command("z2all_ds.track.sinks.session", *arguments),
                package_environment(),
                is_owned=False,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        if self._must_end:
            self.ask_to_end()

    def ask_to_end(self) -> None:
        """Ask the session to deliver everything and end; one that waits for its next attempt may start now."""
        self._must_end, self._start_at = True, 0.0
        if self._process:
            assert self._process.stdin
            with suppress(OSError):
                self._process.stdin.write(b"\n")

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports since the last call; after the end of the process, `finished` or `failed` is the last."""
        assert self._process and self._process.stdout
        code = self._process.poll()  # before reading: after the end all reports are in the pipe
        while chunk := self._process.stdout.read(1 << 16):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        found = []
        for report in map(json.loads, lines):
            self._services = report.get("processes", self._services)
            if report["state"] in ("finished", "failed"):
                self._outcome = report
            else:
                found.append(report)
        if code is not None:
            self.kill()
            why = "it hangs" if code == -signal.SIGALRM else f"its process ended with code {code}"
            found.append(self._outcome or {"state": "failed", "message": why, "is_permanent": False})
        return found

    def kill(self) -> None:
        """Kill the session and the processes it has started: W&B's service has its own process group."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
        for pid, start_time in self._services:
            with suppress(ProcessLookupError, PermissionError):
                if process_is_alive(pid, start_time):
                    os.killpg(pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()
        self._process = None

    def poll(self) -> None:
        """Print new reports, and start the session if it is due. Do not wait."""
        for report in self.reports() if self._process else ():
            if report["state"] == "open" and not self._has_opened:
                self._has_opened = True
                self._say(f"{self.label}: {report['message']}")
            elif report["state"] == "finished":
                self.is_over = True
            elif report["state"] == "failed":
                self._failed(report["message"], report["is_permanent"])
        if not self._process and not self.is_over and time.monotonic() >= self._start_at:
            try:
                self.start()
            except OSError as error:
                self._failed(str(error), is_permanent=False)

    def _failed(self, why: str, is_permanent: bool) -> None:
        now = time.monotonic()
        if now - self._began_at > LONGEST_PAUSE_SECONDS or self._must_end:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        self._start_at = now + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        self.is_over = is_permanent
        if not self._has_warned:
            self._has_warned = True
            rest = "switched off" if is_permanent else "retrying, its records wait in metrics.jsonl"
            self._say(f"{self.label} failed ({' '.join(why.split())}): {rest}; training continues")

    def end(self) -> None:
        """End the session, and report how many records the sink has not confirmed."""
        self.kill()
        with suppress(OSError, ValueError, KeyError):
            if left := unconfirmed(self._folder, self._sink, self._settings):
                option = "" if self._sink == WANDB else f" --to {self._sink}"
                command = f"z2all track sync {shlex.quote(str(self._folder.root))}{option}"
                self._say(f"{self.label} has not confirmed {left:,} records: `{command}` sends the missing ones")


def unconfirmed(folder: RunFolder, sink: str, settings: SinkSettings) -> int:
    """Return the number of records of metrics.jsonl that the sink has not confirmed."""
    mark = Progress.load(folder.sinks / f"{sink}.json").mark(settings.destination(sink), "metrics")
    return sum(map(len, iter(RecordFollower(folder.metrics, mark).read, [])))


class SinkFeed:
    """The sinks of a run. Without any, it starts no process."""

    def __init__(
        self, track: TrackSection, folder: RunFolder, say: Callable[[str], None], hang_seconds: float = HANG_SECONDS
    ) -> None:
        self._say, self._finish_seconds = say, track.finish_seconds
        mode = resolve_wandb_mode(track.wandb)
        settings = SinkSettings(mode, track.tensorboard, track.project, track.finish_seconds, hang_seconds)
        self._sinks = [SinkProcess(folder, sink, settings, say) for sink in settings.sinks]
        if track.wandb == "auto" and mode == "offline":
            reason, login = ("WANDB_MODE=offline", "") if has_wandb_key() else ("no API key", "`wandb login`, then ")
            say(f"W&B: offline ({reason}); {login}`z2all track sync {shlex.quote(str(folder.root))}` sends the run")
        self.poll()

    def poll(self) -> None:
        """Must be called every step."""
        for sink in self._sinks:
            sink.poll()

    def close(self, waits: bool = True, beat: Callable[[], None] = lambda: None) -> None:
        """Wait up to `finish_seconds` until the sinks have delivered everything, and call `beat` meanwhile.

        Without waiting, they have the same time and then end by themselves.
        """
        for sink in self._sinks:
            sink.ask_to_end()
        if not waits:
            return
        began, has_said = time.monotonic(), False
        while left := [sink.label for sink in self._sinks if not sink.is_over]:
            waited = time.monotonic() - began
            if waited > self._finish_seconds:
                break
            if waited > REPORT_WAIT_AFTER_SECONDS and not has_said:
                has_said = True
                limit = f"up to {self._finish_seconds:.0f} s (track.finish_seconds)"
                self._say(f"waiting for {' and '.join(left)}, {limit}")
            beat()
            self.poll()
            time.sleep(0.05)
        for sink in self._sinks:
            sink.end()
