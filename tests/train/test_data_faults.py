"""Shards deleted, damaged or cut before or during a run: one line names them, all ranks end, nothing is lost."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.short_documents import write_short_documents
from tests.helpers.training import losses, run_arguments, train, train_many
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.data import PackedStream
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.run_spec import stream_spec
from z2all_ds.data.trace import TracedPiece, trace_sample
from z2all_ds.tokenizer import load_tokenizer

pytestmark = pytest.mark.extended

STEPS, SAVED_EVERY, SAMPLES_PER_STEP = 120, 20, 8
STOPPED_AFTER = 20
SEEN = 22
"""Number of recorded steps after which a shard is damaged during a run."""
NEEDED_FROM_STEP = 60
"""The damaged line is that of the first document that rank 1 begins at this step or later."""
NAMES = ["deleted", "worker", "cut", "spoilt"]
"""Names of the runs.

`deleted`: the shard is deleted while the run is stopped. `worker`: a line is overwritten while the run is stopped, and
a worker process reads it. `cut`, `spoilt`: the shard is truncated, or a line overwritten, while the run trains.
"""
SETTINGS = (
    *("deepspeed=zero2", "data.num_lanes=8", f"train.steps={STEPS}", f"checkpoint.every_steps={SAVED_EVERY}"),
    "data.verify_shards=false",  # else the checksum is found to differ before the damaged line is reached
)


@dataclass(frozen=True)
class Failure:
    """The outcome of a run on a damaged corpus."""

    shard: str
    code: int
    terminal: list[str]
    """Lines on the terminal, except the usual ones (startup, steps, checkpoints)."""
    errors_logged: list[list[str]]
    """Error lines in the log of each rank."""
    left_behind: dict[int, bytes]
    steps_recorded: int
    newest_checkpoint: int
    expected: list[tuple[int, str]]
    """For each rank, from a stream that resumes at that checkpoint: the steps before the error, and the error line."""


class Workshop:
    """Runs on one corpus, which is damaged and repaired."""

    def __init__(self, folder: Path, corpus: Path, tokenizer: Path) -> None:
        self.folder, self.corpus, self.tokenizer = folder, corpus, tokenizer

    def arguments(self, run: str, *overrides: str) -> list[str]:
        return run_arguments(self.folder / run, self.corpus, self.tokenizer, *SETTINGS, *overrides)

    def first_document(self, rank: int, step: int) -> tuple[int, TracedPiece]:
        """Return the first document that this rank (of two) begins at this step or later, preceded by its step."""
        plan = DataPlan.open(stream_spec(load_run_config(None, self.arguments("any"))), load_tokenizer(self.tokenizer))
        for sample in range((step - 1) * SAMPLES_PER_STEP + rank, STEPS * SAMPLES_PER_STEP, 2):
            for piece in trace_sample(plan, sample).pieces:
                if piece.start == 0:
                    return sample // SAMPLES_PER_STEP + 1, piece
        raise AssertionError("no document begins there")

    def fail(
        self, run: str, shard: str, damage: Callable[[Path], None], *overrides: str, at_step: int | None = None
    ) -> Failure:
        """Run on a corpus damaged beforehand, or once `at_step` steps are recorded; repair it, return the failure."""
        run_folder, path, mark = RunFolder(self.folder / run), self.corpus / shard, new_mark()
        arguments, healthy = self.arguments(run, *overrides), path.read_bytes()
        try:
            if at_step is None:
                damage(path)
            command = [sys.executable, "-m", "z2all_ds", "train", "--ranks", "2", *arguments]
            process = subprocess.Popen(command, env={**os.environ, **mark}, stderr=subprocess.PIPE, text=True)
            if at_step is not None:
                wait_until(lambda: recorded(run_folder) >= at_step or process.poll() is not None, "the run to train")
                damage(path)
            terminal = process.communicate(timeout=300)[1].splitlines()
            left_behind = marked(mark)
            newest = find_latest(run_folder.checkpoints)[0]
            assert newest is not None
            expected = [self._met_by(rank, arguments, newest.path / "data_state.json") for rank in range(2)]
        finally:
            path.write_bytes(healthy)
        logs = [run_folder.rank_log(rank).read_text().splitlines() for rank in range(2)]
        start = (
            r"run folder |model: |tokens per step: |corpus: |shares of tokens: |precision: |dtypes: |ops? |optimizer: "
        )
        usual = re.compile(rf"{start}|step |saved |resumed |loading |first loss after ")
        return Failure(
            shard,
            process.returncode,
            [line for line in terminal if not usual.match(line)],
            [[line for line in log if "Error" in line] for log in logs],
            left_behind,
            recorded(run_folder),
            newest.step,
            expected,
        )

    def _met_by(self, rank: int, arguments: list[str], state: Path) -> tuple[int, str]:
        spec = stream_spec(load_run_config(None, arguments))
        stream = PackedStream(spec, load_tokenizer(self.tokenizer), rank, world_size=2)
        stream.load_state_dict(json.loads(state.read_text()))
        try:
            for _ in stream:
                if stream.position >= STEPS * SAMPLES_PER_STEP:
                    return STEPS, ""
        except DataError as error:
            return stream.position // SAMPLES_PER_STEP, f"{type(error).__name__}: {error}"
        raise AssertionError("a stream has no end")


def recorded(run_folder: RunFolder) -> int:
    return len(run_folder.metrics.read_bytes().splitlines()) if run_folder.metrics.exists() else 0


def cut_short(path: Path) -> None:
    """Truncate the file so much that a run cannot continue for long on what it has already read."""
    os.truncate(path, path.stat().st_size // 20)


def put_garbage(record: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        begin = sum(map(len, lines[:record]))
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(b"\xff" * (len(lines[record]) - 1))

    return damage


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Workshop:
    """Return a workshop with one complete run and two that were stopped."""
    folder = tmp_path_factory.mktemp("faults")
    made = Workshop(folder, write_short_documents(small_corpus, folder / "corpus"), small_tokenizer)
    stop = f"train.stop_at_step={STOPPED_AFTER}"
    plan = [made.arguments("whole"), made.arguments("deleted", stop), made.arguments("worker", stop)]
    assert train_many(folder, plan) == [0, 0, 0]
    return made


@pytest.fixture(scope="module")
def failures(workshop: Workshop) -> dict[str, Failure]:
    """Return the failure of each run. Each has its own launch, and the corpus is repaired after each."""
    _, needed = workshop.first_document(rank=1, step=NEEDED_FROM_STEP)
    spoil = put_garbage(needed.record)
    failures = {
        "deleted": workshop.fail("deleted", needed.shard, Path.unlink),
        "worker": workshop.fail("worker", needed.shard, spoil, "data.num_workers=1"),
        "cut": workshop.fail("cut", needed.shard, cut_short, at_step=SEEN),
        "spoilt": workshop.fail("spoilt", needed.shard, spoil, at_step=SEEN),
    }
    assert list(failures) == NAMES
    return failures


@pytest.mark.parametrize("workers", [0, 1])
def test_a_text_changed_to_another_of_the_same_size_stops_the_run(workers: int, workshop: Workshop) -> None:
    shard = workshop.corpus / "en-00000.jsonl"
    healthy = shard.read_bytes()
    shard.write_bytes(healthy.replace(b" the ", b" THE "))
    try:
        verified = (*SETTINGS, "data.verify_shards=true", f"data.num_workers={workers}")
        result = train(workshop.folder / f"changed_{workers}", workshop.corpus, workshop.tokenizer, *verified)
    finally:
        shard.write_bytes(healthy)
    assert result.returncode == DataError.exit_code
    assert f"DataError: {shard}: its SHA-256 differs from the manifest, the content has changed." in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", NAMES)
def test_one_line_names_the_shard_and_the_record(name: str, failures: dict[str, Failure]) -> None:
    failure = failures[name]
    assert failure.code == DataError.exit_code
    *lines, judged = failure.terminal
    assert judged.startswith("RanksFailed: ")
    assert "stopped with exit code 3 (data error). See the lines above and " in judged
    assert 1 <= len(lines) <= 2  # both ranks may find it in the same step
    logged = [line for log in failure.errors_logged for line in log]
    for line in lines:
        assert re.match(rf"(DataError|BadRecordError): \S+/{failure.shard}, record \d+: the ", line), line
        assert any(line.startswith(said) for said in logged)


@pytest.mark.parametrize("name", NAMES)
def test_no_rank_or_worker_process_is_left(name: str, failures: dict[str, Failure]) -> None:
    assert failures[name].left_behind == {}


def test_a_missing_shard_ends_the_first_step_that_needs_it(failures: dict[str, Failure]) -> None:
    failure = failures["deleted"]
    assert failure.steps_recorded == min(steps for steps, _ in failure.expected) < STEPS
    said = {line for log in failure.errors_logged for line in log}
    assert said
    assert said <= {line for _, line in failure.expected}


def test_a_shard_truncated_during_a_run_ends_it_with_an_error(failures: dict[str, Failure]) -> None:
    failure = failures["cut"]
    assert SEEN <= failure.steps_recorded < STEPS
    assert all("bytes" in line for log in failure.errors_logged for line in log)


@pytest.mark.parametrize("name", ["worker", "spoilt"])
def test_a_damaged_line_is_reported_by_one_rank_only(
    name: str, workshop: Workshop, failures: dict[str, Failure]
) -> None:
    failure = failures[name]
    (nothing, _), (steps, line) = failure.expected
    step, place = workshop.first_document(rank=1, step=NEEDED_FROM_STEP)
    assert (nothing, steps) == (STEPS, step - 1)
    assert f"/{place.shard}, record {place.record}: the line is not JSON" in line
    assert failure.errors_logged == [[], [line]]
    assert failure.terminal[0].startswith(line)
    assert failure.steps_recorded == steps  # a worker also delivers the samples before the error


def test_after_the_repair_runs_resume_with_the_losses_of_an_undisturbed_run(
    workshop: Workshop, failures: dict[str, Failure]
) -> None:
    before = {name: failure.newest_checkpoint for name, failure in failures.items()}
    assert before["deleted"] == STOPPED_AFTER
    for name in ("worker", "spoilt"):
        saved = failures[name].steps_recorded // SAVED_EVERY * SAVED_EVERY
        assert before[name] == saved >= NEEDED_FROM_STEP - SAVED_EVERY
    assert train_many(workshop.folder, [workshop.arguments(name) for name in NAMES]) == [0] * len(NAMES)
    whole = losses(workshop.folder / "whole")
    assert len(whole) == STEPS
    for name in NAMES:
        assert f"resumed from step_{before[name]:08d}" in RunFolder(workshop.folder / name).rank_log(0).read_text()
        assert losses(workshop.folder / name) == whole
