"""Real runs whose disk fills up, turns read-only or hangs: they continue, report it, and save again once possible."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.small_disk import fill, read_only, small_disk, stalled, stalling_disk
from tests.helpers.training import metrics, run_arguments, train
from z2all_ds.base.errors import EXIT_REQUEUE
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint import memory
from z2all_ds.checkpoint.layout import find_latest, step_folders

DISK_BYTES = 16_000_000
EVERY = 50
FIRST = f"saved step_{EVERY:08d}"
ENDLESS = (
    "train.steps=1000000",
    "schedule.kind=constant",
    "train.log_every=1000000",
    "checkpoint.snapshot_every=10",
    f"checkpoint.every_steps={EVERY}",
    "checkpoint.disk_patience_seconds=0.5",
)


class Run:
    """A `z2all train` process in its own session, with its terminal output in a file."""

    def __init__(self, place: Path, corpus: Path, tokenizer: Path, ranks: int = 2, *more: str) -> None:
        self.folder, self.mark = RunFolder(place / "run"), new_mark()
        arguments = run_arguments(self.folder.root, corpus, tokenizer, *ENDLESS, *more)
        self.terminal = place / "terminal"
        with self.terminal.open("ab") as terminal:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "z2all_ds", "train", "--ranks", str(ranks), *arguments],
                env={**os.environ, **self.mark},
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.terminal.read_text()

    def waits_for(self, words: str, times: int = 1) -> None:
        wait_until(lambda: self.said().count(words) >= times or self.process.poll() is not None, words)
        assert self.process.poll() is None, self.said()

    def saves_again(self) -> None:
        """Wait until a checkpoint is saved that starts after this call."""
        steps = len(metrics(self.folder.root))
        newest = f"saved step_{(steps // EVERY + 2) * EVERY:08d}"
        self.waits_for(newest)

    def kill(self) -> None:
        for number in marked(self.mark):
            os.kill(number, signal.SIGKILL)
        self.process.wait()


@pytest.mark.extended
def test_a_run_survives_a_full_and_a_read_only_disk_and_resumes_from_memory(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    with small_disk(checkpoints, DISK_BYTES):
        run = Run(tmp_path, small_corpus, small_tokenizer, 2, "deepspeed=zero1")
        try:
            run.waits_for(FIRST)
            filler = fill(checkpoints)
            run.waits_for("could not be written (rank 0: [Errno 28] No space left on device")
            assert find_latest(checkpoints)[0]  # the previous checkpoint is intact
            filler.unlink()
            run.saves_again()
            with read_only(checkpoints):
                run.waits_for("could not be written (rank 0: [Errno 30] Read-only file system")
                assert find_latest(checkpoints)[0]
            run.saves_again()
            run.kill()
            # The snapshots in memory are newer than the disk; a run with another JSON and number of ranks resumes from
            # them.
            again = Run(tmp_path, small_corpus, small_tokenizer, 1, "deepspeed=zero3")
            try:
                again.waits_for(
                    " in memory, saved by 2 ranks under zero1 (fp32); its loss on fixed tokens differs by 0.0e+00"
                )
                again.process.send_signal(signal.SIGTERM)
                assert again.process.wait(60) == EXIT_REQUEUE, again.said()
            finally:
                again.kill()
        finally:
            run.kill()
        steps = [record["step"] for record in metrics(tmp_path / "run")]
        assert steps == list(range(1, len(steps) + 1))
        newest, damaged = find_latest(checkpoints)
        assert newest and newest.step == steps[-1] and damaged == []
        line = memory.snapshot_folder(run.folder)
        assert line and not line.path.exists()


@pytest.mark.extended
def test_training_continues_while_the_disk_hangs(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.parent.mkdir()
    with stalling_disk(checkpoints, 64_000_000):
        run = Run(tmp_path, small_corpus, small_tokenizer, 2, "deepspeed=zero1")
        try:
            run.waits_for(FIRST)
            with stalled(checkpoints):
                run.waits_for("stays in memory: the disk is still busy with step_", times=3)
                steps = len(metrics(run.folder.root))
                wait_until(lambda: len(metrics(run.folder.root)) > steps + 50, "more steps")
            run.saves_again()
            run.process.send_signal(signal.SIGTERM)
            assert run.process.wait(60) == EXIT_REQUEUE, run.said()
        finally:
            run.kill()
        newest, damaged = find_latest(checkpoints)
        assert newest and newest.step == len(metrics(run.folder.root)) and damaged == []


@pytest.mark.extended
@pytest.mark.parametrize("background", ["always", "never"])
def test_a_disk_that_stays_full_ends_the_run_and_a_later_start_completes_it(
    background: str, tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    """If checkpoints are written in the background, the next start resumes from memory."""
    more = ("deepspeed=zero1", "train.steps=60", "checkpoint.every_steps=10", f"checkpoint.background={background}")
    checkpoints = tmp_path / "run" / "checkpoints"
    with small_disk(checkpoints, DISK_BYTES):
        filler = fill(checkpoints, leave_bytes=200_000)
        failed = train(tmp_path / "run", small_corpus, small_tokenizer, *more, ranks=1)
        assert failed.returncode == 4, failed.stderr
        (line,) = [line for line in failed.stderr.splitlines() if line.startswith("NotSaved")]
        assert "No space left on device" in line and "Free space in" in line
        assert sorted(path.name for path in checkpoints.iterdir()) == ["filler"]
        filler.unlink()
        again = train(tmp_path / "run", small_corpus, small_tokenizer, *more, ranks=1)
        assert again.returncode == 0, again.stderr
        assert ("resumed from step_00000030 in memory" in again.stderr) == (background == "always")
        assert [path.name for path in step_folders(checkpoints)] == ["step_00000050", "step_00000060"]
        assert find_latest(checkpoints)[1] == []


def test_a_second_job_on_the_same_run_folder_is_refused(
    tmp_path: Path, small_corpus: Path, small_tokenizer: Path
) -> None:
    run = Run(tmp_path, small_corpus, small_tokenizer, 1, "deepspeed=zero1")
    try:
        run.waits_for(FIRST)
        second = train(run.folder.root, small_corpus, small_tokenizer, *ENDLESS, "deepspeed=zero1", ranks=1)
        assert second.returncode == 4
        assert f"another job is writing to {run.folder.root}: waiting up to 20 s until it has ended" in second.stderr
        assert "another job is writing to it. Stop that job or set a different run_dir." in second.stderr
        run.saves_again()
    finally:
        run.kill()
        memory.remove_snapshots(run.folder)


@pytest.mark.extended
def test_a_flipped_bit_in_a_snapshot_costs_a_line(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    run = Run(tmp_path, small_corpus, small_tokenizer, 1, "deepspeed=zero1")
    try:
        run.waits_for(FIRST)
        run.kill()
        folder = memory.snapshot_folder(run.folder)
        assert folder
        newest = folder.snapshots()[0]
        with (newest.path / "state" / "rank_00000.safetensors").open("r+b") as file:
            file.seek(-5, os.SEEK_END)  # in the optimizer's state, which the loss on fixed tokens does not show
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        again = Run(tmp_path, small_corpus, small_tokenizer, 1, "deepspeed=zero1")
        try:
            reason = "state/rank_00000.safetensors does not match its checksum"
            again.waits_for(f"checkpoint {newest.name} skipped: {reason}")
            again.waits_for("resumed from step_")
            assert f"resumed from {newest.name}" not in again.said()
        finally:
            again.kill()
    finally:
        run.kill()
        memory.remove_snapshots(run.folder)
