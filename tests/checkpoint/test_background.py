"""Real writer processes: the checkpoints they write, and the problems they report."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.marked import wait_until
from tests.helpers.small_disk import small_disk
from z2all_ds.base.run_folder import RunFolder, file_id
from z2all_ds.checkpoint import layout
from z2all_ds.checkpoint.background import Answer, BackgroundWriter
from z2all_ds.checkpoint.disk_file import file_checksum, hashing_threads
from z2all_ds.checkpoint.writer import Job


def make_slot(place: Path, ranks: int = 1, size: int = 100_000) -> Path:
    (place / "state").mkdir(parents=True)
    for rank in range(ranks):
        (place / "state" / f"rank_{rank:05d}.safetensors").write_bytes(os.urandom(size))
        (place / f"rng_rank_{rank:04d}.pt").touch()
    for name in layout.REQUIRED:
        (place / name).write_text(json.dumps({"tokens_seen": 3}))  # of any step
    return place


def submit(
    writer: BackgroundWriter, slot: Path, checkpoints: Path, rank: int = 0, ranks: int = 1, step: int = 3
) -> None:
    own = (f"state/rank_{rank:05d}.safetensors", f"rng_rank_{rank:04d}.pt")
    files = (*own, *(layout.REQUIRED if rank == 0 else ()))
    job = Job(str(checkpoints), step, "attempt", rank, ranks, {"keep_last": 2})
    writer.submit(job, slot, {name: entry_of(slot / name) for name in files})


def entry_of(file: Path) -> dict[str, Any]:
    with hashing_threads() as threads:
        return {"bytes": file.stat().st_size, "checksum": file_checksum(file, threads)}


@contextmanager
def writers(number: int) -> Iterator[list[BackgroundWriter]]:
    made = [BackgroundWriter() for _ in range(number)]
    try:
        yield made
    finally:
        for writer in made:
            writer.close()


def answer_of(writer: BackgroundWriter) -> Answer:
    answers: list[Answer] = []

    def has_answered() -> bool:
        answer = writer.answer()
        answers.extend([answer] if answer else [])
        return bool(answers)

    wait_until(has_answered, "an answer")
    return answers[0]


def number_of(writer: BackgroundWriter) -> int:
    assert writer._process
    return writer._process.process.pid


def test_a_slot_becomes_a_checkpoint(tmp_path: Path) -> None:
    slot, checkpoints = make_slot(tmp_path / "slot"), tmp_path / "checkpoints"
    with writers(1) as (writer,):
        assert writer.answer() is None
        submit(writer, slot, checkpoints)
        answer = answer_of(writer)
        assert answer.problem is None
        for step in (4, 5, 6):  # by the same process; older checkpoints are deleted
            before = number_of(writer)
            submit(writer, slot, checkpoints, step=step)
            assert answer_of(writer).problem is None and number_of(writer) == before
    newest, damaged = layout.find_latest(checkpoints)
    assert newest and newest.step == 6 and damaged == []
    assert (newest.path / "state" / "rank_00000.safetensors").read_bytes() == (
        slot / "state" / "rank_00000.safetensors"
    ).read_bytes()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000005", "step_00000006"]


def test_rank_0_waits_for_the_other_ranks(tmp_path: Path) -> None:
    slot, checkpoints = make_slot(tmp_path / "slot", ranks=2), tmp_path / "checkpoints"
    with writers(2) as (first, second):
        submit(first, slot, checkpoints, 0, 2)
        time.sleep(0.5)
        assert first.answer() is None and layout.step_folders(checkpoints) == []
        submit(second, slot, checkpoints, 1, 2)
        assert answer_of(second).problem is None and answer_of(first).problem is None
    newest, _ = layout.find_latest(checkpoints)
    assert newest and sorted(path.name for path in (newest.path / "state").iterdir()) == [
        "index.json",
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ]


def test_a_failed_rank_leaves_no_checkpoint(tmp_path: Path) -> None:
    slot, checkpoints = make_slot(tmp_path / "slot", ranks=2), tmp_path / "checkpoints"
    with writers(2) as (first, second):
        submit(first, slot, checkpoints, 0, 2)
        second.submit(Job(str(checkpoints), 3, "attempt", 1, 2), slot, {"state/nowhere": {}})
        assert "No such file" in str(answer_of(second).problem)
        assert str(answer_of(first).problem).startswith("rank 1: ")
        assert layout.step_folders(checkpoints) == [] and list(checkpoints.iterdir()) == []
        # If a writer could not leave a file, its rank reports the problem, and the other ranks abandon the job.
        submit(first, slot, checkpoints, 0, 2)
        first.abandon()
        assert answer_of(first).problem == "another rank could not write its part"
        assert list(checkpoints.iterdir()) == []


def test_a_checkpoint_of_a_run_whose_folder_was_replaced_is_not_sealed(tmp_path: Path) -> None:
    slot, run = make_slot(tmp_path / "slot"), RunFolder(tmp_path / "run")
    files = {name: entry_of(slot / name) for name in layout.REQUIRED}
    lock = run.acquire_lock()
    with writers(1) as (writer,):
        for step in (3, 4):
            writer.submit(Job(str(run.checkpoints), step, "attempt", lock_id=file_id(lock)), slot, files)
            assert answer_of(writer).problem == (None if step == 3 else "the run folder was moved or deleted")
            run.root.rename(tmp_path / f"old_{step}")
            os.close(run.acquire_lock())  # of another job
    os.close(lock)
    assert [path.name for path in layout.step_folders(tmp_path / "old_3" / "checkpoints")] == ["step_00000003"]
    assert list((tmp_path / "old_4" / "checkpoints").iterdir()) == []


def test_a_snapshot_that_was_changed_in_memory_does_not_become_a_checkpoint(tmp_path: Path) -> None:
    """The rank knows the checksums of what it copied; another process has written to the slot since then."""
    slot, checkpoints = make_slot(tmp_path / "slot", ranks=2), tmp_path / "checkpoints"
    with writers(2) as (first, second):
        for name in ("state/rank_00000.safetensors", "trainer.json"):
            intact, entry = (slot / name).read_bytes(), entry_of(slot / name)
            (slot / name).write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
            first.submit(Job(str(checkpoints), 3, "attempt"), slot, {name: entry})
            assert answer_of(first).problem == f"rank 0: {name} does not match its checksum"
            assert list(checkpoints.iterdir()) == []
            (slot / name).write_bytes(intact)
        # The same on another rank.
        submit(first, slot, checkpoints, 0, 2)
        entry = entry_of(slot / "state" / "rank_00001.safetensors") | {"checksum": "0" * 64}
        second.submit(Job(str(checkpoints), 3, "attempt", 1, 2), slot, {"state/rank_00001.safetensors": entry})
        assert str(answer_of(first).problem) == "rank 1: state/rank_00001.safetensors does not match its checksum"
        assert list(checkpoints.iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    slot = make_slot(tmp_path / "slot", size=3_000_000)
    with small_disk(tmp_path / "disk", 2_000_000) as disk, writers(1) as (writer,):
        submit(writer, slot, disk / "checkpoints")
        assert "No space left" in str(answer_of(writer).problem)
        assert list((disk / "checkpoints").iterdir()) == []
        small = make_slot(tmp_path / "small")
        submit(writer, small, disk / "checkpoints")
        assert answer_of(writer).problem is None


def test_a_killed_writer_is_reported_and_started_again(tmp_path: Path) -> None:
    slot, checkpoints = make_slot(tmp_path / "slot", ranks=2), tmp_path / "checkpoints"
    with writers(1) as (writer,):
        submit(writer, slot, checkpoints, 0, 2)  # waits for rank 1
        os.kill(number_of(writer), signal.SIGKILL)
        assert answer_of(writer).problem == "its writer ended with code -9"
        submit(writer, slot, checkpoints)
        assert answer_of(writer).problem is None


def test_a_writer_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    slot, checkpoints = make_slot(tmp_path / "slot", ranks=2), tmp_path / "checkpoints"
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        writer = BackgroundWriter()
        submit(writer, slot, checkpoints, 0, 2)
        os.write(writing, number_of(writer).to_bytes(8, "little"))
        time.sleep(100)
        os._exit(1)
    number = int.from_bytes(os.read(reading, 8), "little")
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)

    def is_gone() -> bool:
        stat = Path(f"/proc/{number}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_until(is_gone, "the writer to end")
    assert layout.step_folders(checkpoints) == []


def test_ctrl_c_does_not_end_a_writer(tmp_path: Path) -> None:
    slot, checkpoints = make_slot(tmp_path / "slot"), tmp_path / "checkpoints"
    with writers(1) as (writer,):
        submit(writer, slot, checkpoints)
        answer_of(writer)
        os.kill(number_of(writer), signal.SIGINT)
        submit(writer, slot, checkpoints, step=4)
        assert answer_of(writer).problem is None
