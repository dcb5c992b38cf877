"""Rank 0's end of the sinks: starts their keeper, hands on what it says, never waits for it while the run trains."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from z2all_ds.base.config.sections import TrackSection
from z2all_ds.base.parent_watch import owner_mark
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.keeper import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, open_log, read_now
from z2all_ds.track.sinks.settings import HANG_SECONDS, LABELS, SinkSettings, has_wandb_key, resolve_wandb_mode

NICENESS = 10
"""Below training's own processes, which then take every processor they ask for."""
SPARE_SECONDS = 5.0
"""For the keeper's own end after `finish_seconds`."""
TELL_AFTER_SECONDS = 2.0
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank, which the keeper is not."""


class SinkFeed:
    """Nothing at all, not even a process, where no sink is wanted."""

    def __init__(
        self, track: TrackSection, folder: RunFolder, say: Callable[[str], None], hang_seconds: float = HANG_SECONDS
    ) -> None:
        self._folder, self._say = folder, say
        mode = resolve_wandb_mode(track.wandb)
        self._settings = SinkSettings(mode, track.tensorboard, track.project, track.finish_seconds, hang_seconds)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._warned = False
        self._start_at, self._pause_seconds = 0.0, FIRST_PAUSE_SECONDS
        if track.wandb == "auto" and mode == "offline":
            reason, way = "no API key is set", "`wandb login`, then "
            if has_wandb_key():
                reason, way = "WANDB_MODE says so", ""
            say(f"W&B: offline, as {reason}; {way}`z2all track sync {shlex.quote(str(folder.root))}` sends it")
        self.poll()

    def poll(self) -> None:
        """Says what the keeper has to say by now, and starts it where there is none: a killed one after a pause."""
        if not self._settings.sinks:
            return
        if self._keeper is None:
            if time.monotonic() >= self._start_at:
                self._start()
            return
        ended = self._keeper.poll()
        self._hand_on()
        if ended is not None:
            self._forget_keeper()
            self._failed(f"its process ended with code {ended}")

    def close(self, waits: bool = True, beat: Callable[[], None] = lambda: None) -> None:
        """Gives sinks their time to deliver what is left; a `beat` now and then shows that this is no hang. They have
        their time also where nobody waits, and end by themselves."""
        if self._keeper is None and self._settings.sinks and waits:
            self._start()  # it was killed, and has not been started again yet
        if self._keeper is None:
            return
        assert self._keeper.stdin
        with suppress(OSError):
            self._keeper.stdin.write(b"\n")
            self._keeper.stdin.close()
        if waits:
            self._wait_for_keeper(beat)
        self._hand_on()
        self._forget_keeper()

    def _wait_for_keeper(self, beat: Callable[[], None]) -> None:
        assert self._keeper
        began, is_told = time.monotonic(), False
        while self._keeper.poll() is None:
            waited = time.monotonic() - began
            if waited > self._settings.finish_seconds + SPARE_SECONDS:
                with suppress(ProcessLookupError):
                    os.killpg(self._keeper.pid, signal.SIGKILL)
                self._keeper.wait()
                return
            if waited > TELL_AFTER_SECONDS and not is_told:
                is_told = True
                names = " and ".join(LABELS[sink] for sink in self._settings.sinks)
                self._say(f"waiting for {names}, up to {self._settings.finish_seconds:.0f} s (track.finish_seconds)")
            beat()
            self._hand_on()
            time.sleep(0.05)

    def _start(self) -> None:
        command = [sys.executable, "-m", "z2all_ds.track.sinks.keeper", str(self._folder.root.absolute())]
        command += [owner_mark(), self._settings.to_argument()]
        own = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        package = str(Path(__file__).resolve().parents[3])  # also where it is not installed
        paths = os.pathsep.join(filter(None, (own.get("PYTHONPATH"), package)))
        try:
            log = open_log(self._folder)
            try:
                self._keeper = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**own, "PYTHONPATH": paths},
                    bufsize=0,
                    start_new_session=True,  # a Ctrl-C at the terminal is for the run, which then decides
                )
            finally:
                os.close(log)
        except OSError as error:  # no process left, no memory: no reason to stop training
            self._failed(str(error))
            return
        assert self._keeper.stdout
        os.set_blocking(self._keeper.stdout.fileno(), False)
        with suppress(OSError):
            own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._keeper.pid, min(own_niceness + NICENESS, 19))

    def _hand_on(self) -> None:
        assert self._keeper and self._keeper.stdout
        while chunk := read_now(self._keeper.stdout.fileno()):
            self._heard += chunk
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            self._say(line.decode(errors="replace"))

    def _forget_keeper(self) -> None:
        assert self._keeper
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            assert pipe
            with suppress(OSError):
                pipe.close()
        self._keeper = None

    def _failed(self, why: str) -> None:
        self._start_at = time.monotonic() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        if not self._warned:
            self._warned = True
            self._say(f"what feeds W&B and TensorBoard fails ({why}): it is started again; training goes on")
