"""Runs exports during training, in a separate process on the CPU at low priority, one at a time.

While one runs, the newest request waits and replaces an older one that was waiting: only the newest model is wanted. A
failed export logs one line; its full output is in the log file. Loads no torch.
"""

import os
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.atomic import open_own
from z2all_ds.base.child_process import end_group, module_command, package_environment, start
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.retention import held

NICENESS = 10
"""Added to our own niceness, so that training has priority."""
CLEANUP_SECONDS = 5.0
"""Time for an export to delete its files after SIGTERM; then it gets another SIGTERM, then SIGKILL."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Removed from the environment of an export, which is not a rank."""


@dataclass(frozen=True)
class _Request:
    checkpoint: Path
    hold: ExitStack
    """While it is open, the run does not delete the checkpoint."""


@dataclass(frozen=True)
class _Running:
    request: _Request
    process: "subprocess.Popen[bytes]"
    log_start: int
    """Offset of its output in the log."""


class BackgroundExport:
    """Exports started by one process of a run; they end when that process ends."""

    def __init__(self, folder: RunFolder, dtype: str = "bf16", model_format: str = "llama") -> None:
        self._folder, self._dtype, self._format = folder, dtype, model_format
        self._running: _Running | None = None
        self._waiting: _Request | None = None

    @property
    def log(self) -> Path:
        return self._folder.root / "logs" / "export.log"

    def start(self, checkpoint: Path) -> str:
        """Export a checkpoint to the run's exports/, now or after the running export. Return a line for the log."""
        request = _Request(checkpoint, ExitStack())
        try:
            request.hold.enter_context(held(checkpoint))
        except CheckpointError as error:
            return f"export of {checkpoint.name} failed ({error})"
        if self._running is None:
            return self._launch(request)
        replaced, self._waiting = self._waiting, request
        line = f"export of {checkpoint.name} waits for that of {self._running.request.checkpoint.name}"
        if replaced is None:
            return line
        replaced.hold.close()
        return f"{line} and replaces {replaced.checkpoint.name}"

    def poll(self) -> list[str]:
        """Return log lines about an export that has ended, and start the waiting one. Does not block."""
        if self._running is None or self._running.process.poll() is None:
            return []
        return self._next()

    def finish(self) -> list[str]:
        """Wait for the running and the waiting export. Return log lines."""
        lines: list[str] = []
        while self._running is not None:
            self._running.process.wait()
            lines += self._next()
        return lines

    def close(self) -> None:
        """End the running export and drop the waiting one."""
        waiting, self._waiting = self._waiting, None
        running, self._running = self._running, None
        if waiting is not None:
            waiting.hold.close()
        if running is not None:
            running.process.terminate()  # in addition to that of end_group: sometimes a single one has no effect
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(CLEANUP_SECONDS)
            end_group(running.process)
            running.request.hold.close()

    def _next(self) -> list[str]:
        assert self._running is not None
        ended, self._running = self._running, None
        waiting, self._waiting = self._waiting, None
        ended.request.hold.close()
        return [self._outcome(ended), *([self._launch(waiting)] if waiting else [])]

    def _launch(self, request: _Request) -> str:
        checkpoint = request.checkpoint
        options = ("--dtype", self._dtype, "--format", self._format)
        command = module_command("z2all_ds", "export", str(checkpoint.absolute()), *options)
        environment = {name: value for name, value in package_environment().items() if name not in RANK_VARIABLES}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "ab", opener=open_own) as log:
                log.write(f"== export of {checkpoint.name}\n".encode())
                log.flush()
                log_start = log.tell()
                process = start(command, environment, stdout=log, stderr=log, cwd=self._folder.root)
        except (OSError, ConfigError) as error:  # such as a full disk: training must not stop
            request.hold.close()
            return f"export of {checkpoint.name} failed ({error})"
        with suppress(OSError):
            own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, min(own_niceness + NICENESS, 19))
        self._running = _Running(request, process, log_start)
        return f"export of {checkpoint.name} started in the background"

    def _outcome(self, ended: _Running) -> str:
        lines: list[str] = []
        with suppress(OSError), self.log.open("rb") as log:  # it may have been deleted
            log.seek(ended.log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no output"
        name, code = ended.request.checkpoint.name, ended.process.returncode
        if code == 0:
            return f"exported {name}: {last}"
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"export of {name} failed ({reason}: {last}); training continues, see {self.log}"
