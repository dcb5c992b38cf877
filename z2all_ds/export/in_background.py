"""Exports beside a training run: a process of its own, on processors that nobody else wants, never in training's way.

One at a time. While one is at work the newest request waits, and an older one that waited is given up: what is wanted
is the newest model. A failed export costs a line, and the whole story is in the log. Loads no torch.
"""

import os
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.base.child_process import end_group, module_command, package_environment, start
from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.retention import held

NICENESS = 10
"""Below training's own processes, which then take every processor they ask for."""
SECONDS_TO_TIDY_UP = 5.0
"""After SIGTERM an export removes what it has written; then it gets another SIGTERM, then SIGKILL."""
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank, which an export is not."""


@dataclass(frozen=True)
class _Wanted:
    checkpoint: Path
    hold: ExitStack
    """As long as it is open, the run does not delete the checkpoint."""


@dataclass(frozen=True)
class _Running:
    wanted: _Wanted
    process: "subprocess.Popen[bytes]"
    log_begin: int
    """Where its words begin in the log."""


class BackgroundExport:
    """Owned by one process of a run, which starts exports and asks after them; when it dies they end."""

    def __init__(self, folder: RunFolder, dtype: str = "bf16", model_format: str = "llama") -> None:
        self._folder, self._dtype, self._format = folder, dtype, model_format
        self._running: _Running | None = None
        self._waiting: _Wanted | None = None

    @property
    def log(self) -> Path:
        return self._folder.root / "logs" / "export.log"

    def start(self, checkpoint: Path) -> str:
        """Exports a checkpoint into the run's exports/, now or after the one at work. Returns a line to say."""
        wanted = _Wanted(checkpoint, ExitStack())
        try:
            wanted.hold.enter_context(held(checkpoint))
        except CheckpointError as error:
            return f"export of {checkpoint.name} failed ({error})"
        if self._running is None:
            return self._launch(wanted)
        given_up, self._waiting = self._waiting, wanted
        instead = ""
        if given_up:
            given_up.hold.close()
            instead = f", in place of {given_up.checkpoint.name}"
        return f"export of {checkpoint.name} waits for that of {self._running.wanted.checkpoint.name}{instead}"

    def poll(self) -> list[str]:
        """Lines to say about what has ended since the last call, without waiting; starts the one that waits."""
        if self._running is None or self._running.process.poll() is None:
            return []
        return self._next()

    def finish(self) -> list[str]:
        """Waits for the one at work and the one that waits. Returns lines to say."""
        lines: list[str] = []
        while self._running is not None:
            self._running.process.wait()
            lines += self._next()
        return lines

    def close(self) -> None:
        """Ends the one at work and forgets the one that waits."""
        if self._waiting is not None:
            self._waiting.hold.close()
            self._waiting = None
        if self._running is not None:
            process, hold = self._running.process, self._running.wanted.hold
            self._running = None
            process.terminate()  # one SIGTERM more than that of end_group: sometimes one has no effect
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_TIDY_UP)
            end_group(process)
            hold.close()

    def _next(self) -> list[str]:
        assert self._running is not None
        ended, self._running = self._running, None
        ended.wanted.hold.close()
        lines = [self._outcome(ended)]
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            lines.append(self._launch(waiting))
        return lines

    def _launch(self, wanted: _Wanted) -> str:
        checkpoint = wanted.checkpoint
        options = ("--dtype", self._dtype, "--format", self._format)
        command = module_command("z2all_ds", "export", str(checkpoint.absolute()), *options)
        environment = {name: value for name, value in package_environment().items() if name not in OF_RANKS}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                log.write(f"== export of {checkpoint.name}\n".encode())
                log.flush()
                begin = log.tell()
                process = start(command, environment, stdout=log, stderr=log, cwd=self._folder.root)
        except OSError as error:  # a full disk, no process left: no reason to stop training
            wanted.hold.close()
            return f"export of {checkpoint.name} failed ({error})"
        with suppress(OSError):
            own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, min(own_niceness + NICENESS, 19))
        self._running = _Running(wanted, process, begin)
        return f"export of {checkpoint.name} begins in the background"

    def _outcome(self, ended: _Running) -> str:
        words: list[str] = []
        with suppress(OSError), self.log.open("rb") as log:  # somebody may have removed it
            log.seek(ended.log_begin)
            words = log.read().decode(errors="replace").strip().splitlines()
        last = words[-1] if words else "it said nothing"
        name, code = ended.wanted.checkpoint.name, ended.process.returncode
        if code == 0:
            return f"exported {name}: {last}"
        ending = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"export of {name} failed ({ending}: {last}); training goes on, see {self.log}"
