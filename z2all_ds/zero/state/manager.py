"""Manages the saves of one run. If memory suffices, a save is a snapshot, which a writer process per rank writes to
disk; otherwise all ranks write to disk while training waits.

A slow or full disk does not end the run at once: the state stays in memory, and the next save tries again.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from z2all_ds.base.config.sections import CheckpointSection
from z2all_ds.base.console import human_bytes, human_seconds
from z2all_ds.base.errors import CheckpointError, NotSaved
from z2all_ds.base.run_folder import LOCK_PATIENCE_SECONDS, RunFolder
from z2all_ds.base.world import World
from z2all_ds.checkpoint import layout, memory
from z2all_ds.checkpoint.background import Answer, BackgroundWriter
from z2all_ds.checkpoint.memory import SnapshotFolder
from z2all_ds.checkpoint.retention import Retention
from z2all_ds.zero.process_group import from_rank_0, gathered
from z2all_ds.zero.state.engine_state import has_needed_files
from z2all_ds.zero.state.save import new_job, not_saved, plan_save, save_checkpoint
from z2all_ds.zero.state.snapshots import SnapshotLost, Snapshots, why_not_in_memory

MAX_CONSECUTIVE_FAILURES = 3
POLL_SECONDS = 0.05
REPORT_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class CompletedSave:
    """A checkpoint that is on disk."""

    step: int
    seconds: float
    """From the start of the save until it was sealed."""
    data_state: dict[str, Any]


@dataclass
class _PendingWrite:
    """A snapshot that is being written to disk; the same on all ranks except for slot and answer."""

    step: int
    slot: int
    started: float
    data_state: dict[str, Any]
    is_waited_for: bool
    """Training waits for it, and the waiting save reports failures."""
    answer: Answer | None = None
    """The answer of this rank's writer."""
    is_late: bool = False
    """A save has already waited for it for the full patience."""
    is_abandoned: bool = False
    is_lost: bool = False
    """It could not be written, and its snapshot is no longer complete."""


class CheckpointManager:
    """One rank's part. All methods except `completed_saves`, `wait_for_pending_write` and `close` are collective."""

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
        self._snapshot_folder = SnapshotFolder(memory.new_lineage())
        self._snapshots: Snapshots | None = None
        self._lock: int | None = None
        """Descriptor of the lock on the snapshot folder."""
        self._is_prepared = section.background == "never"
        self._writer = BackgroundWriter()
        self._pending: _PendingWrite | None = None
        self._consecutive_failures = 0
        self._must_write_next = False
        """The last write has failed for lack of a complete snapshot: the next save goes to disk, too."""
        self._last_problem: str | None = None
        self._completed: list[CompletedSave] = []

    # Start of a run

    def newest_in_memory(self, engine: Any) -> layout.Checkpoint | None:
        """Return the newest intact snapshot that every rank can read on its machine; report damaged ones."""
        folder = from_rank_0(memory.snapshot_folder(self._folder))
        here = {snapshot.step: snapshot for snapshot in folder.snapshots()} if folder else {}
        if not all(gathered(not (folder and here) or self._hold(folder))):
            self._say("snapshots in memory skipped: another process holds their lock")
            return None
        for step in sorted(set.intersection(*gathered(set(here))), reverse=True):
            problem = memory.why_damaged(
                here[step], self._section.verify_checksums, self._world.local_rank, self._world.local_world_size
            )
            if first := next(filter(None, gathered(problem)), None):
                self._say(f"checkpoint {here[step].name} skipped: {first}")
            elif all(gathered(has_needed_files(engine, here[step].path, memory.files_of(here[step])))):
                return here[step]
        return None

    def begin_lineage(self, resumes_from_memory: bool) -> None:
        """Keep the lineage or start a new one, and remove the run's other snapshots from this machine, and those of
        runs whose folder was moved or deleted."""
        before = from_rank_0(memory.snapshot_folder(self._folder))
        self._snapshot_folder = from_rank_0(before if before and resumes_from_memory else self._snapshot_folder)
        if self._snapshot_folder != before:
            self._release()
        if self._world.is_main:
            memory.write_lineage(self._folder, self._snapshot_folder)
        if self._world.local_rank == 0:
            memory.remove_snapshots(self._folder, but=self._snapshot_folder)
            if freed := sum(found.remove() for found in memory.unneeded_snapshots()):
                self._say(f"{human_bytes(freed)} of memory freed: snapshots of runs whose folder was moved or deleted")

    def _hold(self, folder: SnapshotFolder) -> bool:
        """Lock the snapshots, once and by the first rank of each node. Return False if another process has done so."""
        if self._world.local_rank == 0 and self._lock is None:
            self._lock = folder.lock(self._world.rank, LOCK_PATIENCE_SECONDS)
            return self._lock is not None
        return True

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_snapshots(self) -> None:
        self._release()
        if self._world.local_rank == 0:
            self._snapshot_folder.remove()

    # Saving

    def prepare(self, engine: Any) -> None:
        """Reserve memory for snapshots after the first step, when the size of the state is known; later calls do
        nothing."""
        if self._is_prepared:
            return
        self._is_prepared = True
        why_not = why_not_in_memory(engine, self._world, self._snapshot_folder)
        if why_not is None:
            self._snapshots = Snapshots(self._snapshot_folder, self._folder.root, self._world, self._device)
            self._hold(self._snapshot_folder)
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
        """Return when training may continue or, with `wait`, when the checkpoint is on disk. Return False if nothing
        was saved."""
        started, checkpoints, lock_id = time.monotonic(), self._folder.checkpoints, self._folder.lock_id
        if from_rank_0(self._folder.is_lost):
            fix = "Start again with its present path as run_dir, and stop a job before you move its folder."
            raise CheckpointError(f"run folder {self._folder.root}", "was moved or deleted while it was in use", fix)
        if self._snapshots is None:
            if to_disk:
                save_checkpoint(engine, checkpoints, step, trainer, data_state, self._retention, lock_id)
                self._completed.append(CompletedSave(step, time.monotonic() - started, data_state))
            return to_disk
        is_free = self._wait_for_writers(None if wait else self._section.disk_patience_seconds if to_disk else 0.0)
        to_disk = to_disk or self._must_write_next
        plan = plan_save(engine, step, trainer, data_state)
        try:
            slot, files = self._snapshots.take(plan, busy=self._pending.slot if self._pending else None)
        except SnapshotLost as lost:
            self._say(f"{lost.what}: {lost.rule}; it is written to disk instead, and training waits for it")
            save_checkpoint(engine, checkpoints, step, trainer, data_state, self._retention, lock_id)
            self._forget_snapshots()
            self._completed.append(CompletedSave(step, time.monotonic() - started, data_state))
            return True
        if to_disk and is_free:
            self._pending = _PendingWrite(step, slot, started, data_state, is_waited_for=wait)
            self._must_write_next = False
            job = new_job(checkpoints, step, self._retention, lock_id)
            self._writer.submit(job, self._snapshot_folder.slot(slot), {name: files[name] for name in plan.to_disk()})
        elif to_disk and self._pending:
            late = layout.step_name(self._pending.step)
            self._say(f"{layout.step_name(step)} stays in memory: the disk is still busy with {late}")
        if wait:
            self._wait_for_writers(None)
            if self._last_problem:
                raise not_saved(step, self._last_problem, checkpoints)
        return True

    def _forget_snapshots(self) -> None:
        """Give up the snapshots; the next step prepares new ones, in a new folder: something else may have the name of
        the lost one."""
        assert self._snapshots
        self._snapshots.close()
        self._remove_snapshots()
        self._snapshots, self._is_prepared = None, False
        self._snapshot_folder = SnapshotFolder(memory.new_lineage())
        self.begin_lineage(resumes_from_memory=False)

    def finish(self) -> None:
        """Wait until the pending write is complete."""
        self._wait_for_writers(None)

    def completed_saves(self) -> list[CompletedSave]:
        """Return the saves completed since the last call; ranks other than 0 know only those that they waited for."""
        self._poll_writer()
        found, self._completed = self._completed, []
        return found

    def wait_for_pending_write(self) -> None:
        """Wait for the pending write, at most as long as a save would. For a rank that failed: its end ends all other
        ranks and their writers."""
        pending = self._pending
        if pending is None:
            return
        manifest = self._folder.checkpoints / layout.step_name(pending.step) / layout.MANIFEST
        deadline = time.monotonic() + self._section.disk_patience_seconds
        while time.monotonic() < deadline and not manifest.exists():
            self._poll_writer()
            if pending.answer and pending.answer.problem:
                return
            time.sleep(POLL_SECONDS)

    def close(self, keeps_memory: bool) -> None:
        """End the writer; remove the snapshots unless the run may resume from them. Also called after errors."""
        self._writer.close()
        if self._snapshots:
            self._snapshots.close()
        if not keeps_memory:
            self._remove_snapshots()
        self._release()

    def _poll_writer(self) -> None:
        """Take the answer of this rank's writer, and report a failure at once."""
        pending = self._pending
        if pending is None or pending.answer or not (answer := self._writer.answer()):
            return
        pending.answer = answer
        if answer.problem and not pending.is_waited_for:
            snapshot = layout.Checkpoint(self._snapshot_folder.slot(pending.slot), pending.step)
            pending.is_lost = memory.why_damaged(snapshot, verify_checksums=False) is not None
            where, then = ("is lost", "goes to disk") if pending.is_lost else ("stays in memory", "tries again")
            what = f"checkpoint of step {pending.step} could not be written ({answer.problem})"
            self._say(f"{what}; it {where}, and the next save {then}")
        elif self._world.is_main and not answer.problem:
            self._completed.append(CompletedSave(pending.step, time.monotonic() - pending.started, pending.data_state))

    def _wait_for_writers(self, patience_seconds: float | None) -> bool:
        """Wait until the pending write has ended on all ranks, and return whether it has; None: without a limit."""
        pending = self._pending
        if pending is None:
            return True
        started = reported = time.monotonic()
        while True:
            self._poll_writer()
            now = time.monotonic()
            is_over = patience_seconds is not None and (pending.is_late or now - started >= patience_seconds)
            answers = gathered(pending.answer)
            problems = [answer.problem for answer in answers if answer and answer.problem]
            if all(answers):
                self._pending = None
                self._must_write_next = bool(problems) and any(gathered(pending.is_lost))
                self._count_failures(pending.step, problems)
                return True
            if problems and not pending.is_abandoned:
                pending.is_abandoned = True
                self._writer.abandon()
            if from_rank_0(is_over):
                pending.is_late = pending.is_late or bool(patience_seconds)
                return False
            if now - reported > REPORT_EVERY_SECONDS:
                reported = now
                waited = human_seconds(now - started)
                self._say(f"waiting for the disk: {layout.step_name(pending.step)} ... {waited}")
            time.sleep(POLL_SECONDS)

    def _count_failures(self, step: int, problems: list[str]) -> None:
        self._last_problem = problems[0] if problems else None
        self._consecutive_failures = self._consecutive_failures + 1 if problems else 0
        if self._consecutive_failures == MAX_CONSECUTIVE_FAILURES:
            raise NotSaved(
                f"checkpoint of step {step}",
                f"the last {MAX_CONSECUTIVE_FAILURES} could not be written ({problems[0]})",
                f"Free space in {self._folder.checkpoints} and run the same command: it resumes from memory, or from"
                " the last checkpoint.",
            )
