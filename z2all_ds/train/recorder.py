"""Records of a run during training: metrics.jsonl, events.jsonl, the terminal and the sinks.

Every rank has a Recorder and calls it alike; only rank 0 writes records, the others only write to their logs.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import RunStage
from z2all_ds.base.fault_records import FAULT_VARIABLE, LAUNCH_VARIABLE
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.data.trace import drop_states_after, keep_state
from z2all_ds.track.goodput import goodput_so_far
from z2all_ds.track.live import LivePanel
from z2all_ds.track.sinks.feed import SinkFeed
from z2all_ds.track.writer import NO_END, RunWriter, drop_metrics_after, read_records, record_failure
from z2all_ds.train.meters.channel_loss import RankCost
from z2all_ds.train.processes.logs import RankOutput
from z2all_ds.train.processes.startup import Startup
from z2all_ds.train.summary import end_lines

HEALTH_EVERY_SECONDS = 10.0


class Recorder:
    """Opened by `begin`, once the first step is known."""

    def __init__(self, run: RunConfig, folder: RunFolder, world: World, output: RankOutput, startup: Startup) -> None:
        self._run, self._folder, self._writes = run, folder, world.is_main
        self._output = output
        self.say, self.say_step = output.say, output.say_step
        self._startup: Startup | None = startup
        self._writer: RunWriter | None = None
        self._sinks: SinkFeed | None = None
        self._panel: LivePanel | None = None
        self._health_written = -HEALTH_EVERY_SECONDS

    def begin(self, step: int, **facts: Any) -> None:
        if self._writes:
            record_failure(self._folder, NO_END)  # of the process before, which could not do it
        dropped = self._open_after(step)
        if self._run.track.panel == "auto":
            self._panel = self._output.show_panel(self._folder.root.name, self._run.train.steps, step)
        launch = os.environ.get(LAUNCH_VARIABLE)
        self.event("started", step=step, **facts, **({"launch": launch} if launch else {}))
        self._report_dropped(dropped, step)
        if self._writes:
            self._sinks = SinkFeed(self._run.track, self._folder, self.say)

    def go_back_to(self, step: int) -> None:
        """Drop the records of later steps, which will be repeated."""
        self._report_dropped(self._open_after(step), step)

    def _open_after(self, step: int) -> int:
        """Return how many records of later steps were dropped."""
        if not self._writes:
            return 0
        drop_states_after(self._folder, step)
        if self._writer is None:
            dropped = drop_metrics_after(self._folder.metrics, step)
            self._writer = RunWriter(self._folder, warn=self.say)
            return dropped
        return self._writer.drop_metrics_after(step)

    def _report_dropped(self, records: int, step: int) -> None:
        if records:
            self.event("metrics_dropped", records=records, after_step=step)

    def event(self, kind: str, **details: Any) -> None:
        if self._writer:
            self._writer.event(kind, **details)
        if self._panel:
            self._panel.event({"time_unix": time.time(), "event": kind, **details})

    def metric(self, record: dict[str, Any]) -> None:
        """Record one step; the first record of the process also reports the startup time."""
        if self._startup:
            self._startup.done("first_step")
            self.say(self._startup.line())
            self.event("first_step", step=record["step"], **self._startup.as_event())
            if fault_at := os.environ.get(FAULT_VARIABLE):
                self.event("recovered", step=record["step"], seconds=round(time.time() - float(fault_at), 3))
            self._startup = None
        if self._writer and self._sinks:
            self._writer.metric(record)
            self._sinks.poll()
        if self._panel:
            self._panel.metric(record)

    def health(self, step: int, costs: Sequence[RankCost]) -> None:
        """Record the cost of this step per rank; limited in rate, since a thousand ranks would fill a disk."""
        now = time.monotonic()
        is_known = any(cost.work_seconds for cost in costs)
        if self._writer and is_known and now - self._health_written >= HEALTH_EVERY_SECONDS:
            self._health_written = now
            by_rank = zip(*costs, strict=True)
            self._writer.health(
                step, **{name: list(values) for name, values in zip(RankCost._fields, by_rank, strict=True)}
            )

    def stage(self, stage: RunStage, step: int) -> None:
        shape = f"{stage.global_batch} x {stage.sequence_length} tokens per step, rope theta {stage.rope_theta:g}"
        self.say(f"stage {stage.name}: steps {stage.first_step + 1} to {stage.end_step}, {shape}")
        self.event("stage", step=step, name=stage.name, sequence_length=stage.sequence_length)

    def saved(self, step: int, seconds: float) -> None:
        """Record for how long training was paused; with background writing, the state is only in memory so far."""
        self.event("saved", step=step, seconds=round(seconds, 3))

    def on_disk(self, step: int, name: str, seconds: float, data_state: dict[str, Any]) -> None:
        if self._writes:
            keep_state(self._folder, step, data_state, self.say)
        self.event("checkpoint", step=step, path=name, write_seconds=round(seconds, 3))
        self.say(f"saved {name} in {seconds:.1f} s")

    def end(self, outcome: str, step: int, words: str) -> None:
        if self._writer and not self._startup:  # without a step, the time since the run's end means nothing
            used = goodput_so_far(self._folder)
            self.event(outcome, step=step, goodput=round(used.share, 4))
            self.say(used.line())
        else:
            self.event(outcome, step=step)
        if self._writer:
            for line in end_lines(self._run, self._folder, read_records(self._folder.metrics), outcome):
                self.say(line)
        self.say(f"{words} at step {step}")

    def fail(self, step: int, error: BaseException) -> None:
        """Record why the run ends; without an effect before `begin`."""
        self.event("failed", step=step, reason=" ".join(f"{type(error).__name__}: {error}".split()))

    def close(self, waits_for_sinks: bool, beat: Callable[[], None]) -> None:
        """Close the files. After an error, do not wait for the sinks: the error must be reported first."""
        self._output.close_panel()
        if self._writer:
            self._writer.close()
        if self._sinks:
            self._sinks.close(waits_for_sinks, beat)
