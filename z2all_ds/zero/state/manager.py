"""The saves of one run. Where memory suffices, a save is a snapshot, and a writer process per rank brings it to the
disk; else all ranks write to the disk and training waits.

A slow or full disk costs a line, not the run: the state stays in memory, and the next save tries again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from z2all_ds.base.atomic import write_whole
from z2all_ds.base.config.sections import CheckpointSection
from z2all_ds.base.console import human_seconds
from z2all_ds.base.errors import CheckpointError, NotSaved
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.background import Answer, BackgroundWriter
from z2all_ds.checkpoint.memory import SnapshotFolder
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.zero.collective import from_rank_0, gathered
from z2all_ds.zero.state.engine_state import can_read
from z2all_ds.zero.state.save import could_not_be_written, new_job, plan_save, save_checkpoint
from z2all_ds.zero.state.snapshots import Snapshots, why_not_in_memory

MOST_FAILURES_IN_A_ROW = 3
LOOK_EVERY_SECONDS = 0.05
SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class OnDisk:
    """A checkpoint that is there now."""

    step: int
    seconds: float
    """From the save to the seal."""
    data_state: dict[str, Any]

    @property
    def name(self) -> str:
        return layout.step_name(self.step)


@dataclass
class _InFlight:
    """A snapshot on its way to the disk; the same on all ranks, but for the slot's number and the answer."""

    step: int
    slot: int
    started: float
    data_state: dict[str, Any]
    answer: Answer | None = None
    """Of this rank's writer."""
    is_late: bool = False
    """It was waited for as long as is allowed."""
    is_abandoned: bool = False
    is_waited_for: bool = False
    """The run stands still until it is there; then it says itself what went wrong."""


class CheckpointManager:
    """One rank's part; all methods but `news`, `let_arrive` and `close` are collective."""

    def __init__(
        self,
        folder: RunFolder,
        section: CheckpointSection,
        world: World,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._section, self._world, self._device, self._say = folder, section, world, device, say
        self._retention = Retention.of(section)
        self._line = SnapshotFolder(memory.new_lineage())
        self._snapshots: Snapshots | None = None
        self._is_decided = section.background == "never"
        self._writer = BackgroundWriter()
        self._in_flight: _InFlight | None = None
        self._failures_in_a_row = 0
        self._last_problem: str | None = None
        self._news: list[OnDisk] = []

    # Going on

    def newest_in_memory(self, engine: Any) -> layout.Checkpoint | None:
        """The newest snapshot that every rank can read where it is."""
        line = from_rank_0(memory.line_of(self._folder))
        here = {snapshot.step: snapshot for snapshot in line.snapshots()} if line else {}
        for step in sorted(set.intersection(*gathered(set(here))), reverse=True):
            if all(gathered(can_read(engine, here[step].path))):
                return here[step]
        return None

    def begin_line(self, goes_on_from_memory: bool) -> None:
        """When it is known where the run begins. Snapshots of other lines of steps are removed from this machine."""
        before = memory.line_of(self._folder)
        self._line = from_rank_0(before if before and goes_on_from_memory else self._line)
        if self._world.is_main:
            write_whole(self._folder.lineage, self._line.lineage)
        if self._world.local_rank == 0:
            memory.remove_all_of(self._folder, but=self._line)

    # Saving

    def prepare(self, engine: Any) -> None:
        """After a step was taken: what is to be saved is known from then on. Does nothing the next times."""
        if self._is_decided:
            return
        self._is_decided = True
        why_not = why_not_in_memory(engine, self._world, self._line)
        if why_not is None:
            self._snapshots = Snapshots(self._line, self._folder.root, self._world, self._device)
            self._snapshots.prepare(engine)
        elif self._section.background == "always":
            raise CheckpointError("checkpoint.background=always", why_not, "Set auto: saves then wait for the disk.")
        else:
            self._say(f"training will wait for each checkpoint: {why_not}")

    def save(
        self,
        engine: Any,
        step: int,
        trainer: dict[str, Any],
        data_state: dict[str, Any],
        to_disk: bool = True,
        wait: bool = False,
    ) -> bool:
        """Returns when training may continue or, with `wait`, when the checkpoint is on the disk. False where nothing
        was saved. `news` says what is on the disk."""
        started, checkpoints = time.monotonic(), self._folder.checkpoints
        if self._snapshots is None:
            if to_disk:
                save_checkpoint(engine, checkpoints, step, trainer, data_state, self._retention)
                self._news.append(OnDisk(step, time.monotonic() - started, data_state))
            return to_disk
        is_free = self._settle(None if wait else self._section.disk_patience_seconds if to_disk else 0.0)
        plan = plan_save(engine, step, trainer, data_state)
        number = self._snapshots.take(plan, busy=self._in_flight.slot if self._in_flight else None)
        if to_disk and is_free:
            self._in_flight = _InFlight(step, number, started, data_state, is_waited_for=wait)
            job = new_job(checkpoints, step, self._retention)
            self._writer.submit(job, self._line.slot(number), list(plan.to_disk()))
        elif to_disk and self._in_flight:
            late = layout.step_name(self._in_flight.step)
            self._say(f"{layout.step_name(step)} stays in memory: the disk is still busy with {late}")
        if wait:
            self._settle(None)
            if self._last_problem:
                raise could_not_be_written(step, self._last_problem, checkpoints)
        return True

    def finish(self) -> None:
        """What is on its way is on the disk when this returns."""
        self._settle(None)

    def news(self) -> list[OnDisk]:
        """What has come onto the disk since this was asked last; ranks but the first know only what they waited for."""
        self._hear()
        found, self._news = self._news, []
        return found

    def let_arrive(self) -> None:
        """Before a rank that failed ends, and with it all others and their writers: waits, as long as a save would,
        for what is on its way to the disk. Every rank by itself."""
        flight = self._in_flight
        if flight is None:
            return
        manifest = self._folder.checkpoints / layout.step_name(flight.step) / layout.MANIFEST
        deadline = time.monotonic() + self._section.disk_patience_seconds
        while time.monotonic() < deadline and not manifest.exists():
            self._hear()
            if flight.answer and flight.answer.problem:
                return
            time.sleep(LOOK_EVERY_SECONDS)

    def close(self, keeps_memory: bool) -> None:
        """`keeps_memory`: the run may go on from its snapshots. Also after an error."""
        self._writer.close()
        if self._snapshots:
            self._snapshots.close()
        if not keeps_memory and self._world.local_rank == 0:
            self._line.remove()

    def _hear(self) -> None:
        """A part that could not be written is said at once, by the rank whose it is."""
        flight = self._in_flight
        if flight is None or flight.answer or not (answer := self._writer.answer()):
            return
        flight.answer = answer
        if answer.problem and not flight.is_waited_for:
            what = f"checkpoint of step {flight.step} could not be written ({answer.problem})"
            self._say(f"{what}; it stays in memory, and the next one is tried")
        elif self._world.is_main and not answer.problem:
            self._news.append(OnDisk(flight.step, time.monotonic() - flight.started, flight.data_state))

    def _settle(self, patience_seconds: float | None) -> bool:
        """Waits, at most so long, until the last write has ended everywhere; True where it has."""
        flight = self._in_flight
        if flight is None:
            return True
        started = said = time.monotonic()
        while True:
            self._hear()
            now = time.monotonic()
            is_over = patience_seconds is not None and (flight.is_late or now - started >= patience_seconds)
            answers = gathered(flight.answer)
            if all(answers):
                self._in_flight = None
                self._count(flight.step, [answer.problem for answer in answers if answer and answer.problem])
                return True
            if any(answer and answer.problem for answer in answers) and not flight.is_abandoned:
                flight.is_abandoned = True
                self._writer.abandon()
            if from_rank_0(is_over):
                flight.is_late = flight.is_late or bool(patience_seconds)
                return False
            if now - said > SAY_EVERY_SECONDS:
                said = now
                self._say(f"waiting for the disk: {layout.step_name(flight.step)} ... {human_seconds(now - started)}")
            time.sleep(LOOK_EVERY_SECONDS)

    def _count(self, step: int, problems: list[str]) -> None:
        self._last_problem = problems[0] if problems else None
        self._failures_in_a_row = self._failures_in_a_row + 1 if problems else 0
        if self._failures_in_a_row == MOST_FAILURES_IN_A_ROW:
            raise NotSaved(
                f"checkpoint of step {step}",
                f"the last {MOST_FAILURES_IN_A_ROW} could not be written ({problems[0]})",
                f"Make room in {self._folder.checkpoints} and start again: the run goes on from its memory, or from the"
                " last checkpoint.",
            )
