"""A shard that is deleted, damaged or cut under a run: one line names it, all ranks end, and nothing is lost."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.data.text_corpora import write_text_corpus
from tests.helpers.marked import marked, new_mark, wait_until
from tests.helpers.training import losses, metrics, run_arguments, train_many
from z2all_ds.checkpoint.layout import find_latest
from z2all_ds.config import load_run_config
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.data import PackedStream
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.documents import Place
from z2all_ds.data.readers import open_domains
from z2all_ds.data.trace import trace_sample
from z2all_ds.errors import DataError
from z2all_ds.tokenizer import load_tokenizer
from z2all_ds.track.writer import last_outcome
from z2all_ds.run_folder import RunFolder
from z2all_ds.train.inputs import stream_spec

STEPS, STOP, EVERY = 120, 20, 20
SAMPLES_PER_STEP = 8
BROKEN_STEP = 60
"""The step that needs the document with the garbage."""
SETTINGS = ("deepspeed=zero2", "data.num_lanes=8", f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}")
CHARACTERS_PER_DOCUMENT = 400


def short_documents(small_corpus: Path, folder: Path) -> Path:
    """The text of the small corpus in some 1,500 documents: lanes read blocks of several, from several shards."""
    shards = {}
    for name, reader in open_domains(small_corpus, load_manifest(small_corpus)).items():
        text = "\n".join(reader.read(number) for number in range(reader.num_documents))
        size = CHARACTERS_PER_DOCUMENT
        documents = [text[begin : begin + size] for begin in range(0, len(text), size)]
        shards[name] = [documents[begin : begin + 150] for begin in range(0, len(documents), 150)]
    return write_text_corpus(folder, shards)


@dataclass(frozen=True)
class Outcome:
    """Of a run whose corpus was damaged."""

    damaged: str
    """The shard."""
    result: subprocess.CompletedProcess[str]
    left_behind: dict[int, bytes]
    steps_recorded: int
    log_lines: list[str]
    """The errors in the ranks' logs."""
    expected: list[str | None]
    """What each rank finds when it reads on from the checkpoint, on its own."""
    newest_checkpoint: int


class Damages:
    """Makes runs on one corpus, damages it, and mends it again."""

    def __init__(self, folder: Path, corpus: Path, tokenizer: Path) -> None:
        self.folder, self.corpus, self.tokenizer = folder, corpus, tokenizer

    def arguments(self, run: str, *overrides: str) -> list[str]:
        return run_arguments(self.folder / run, self.corpus, self.tokenizer, *SETTINGS, *overrides)

    def first_document_of(self, sample: int) -> Place:
        """The first that a global sample begins anew."""
        spec = stream_spec(load_run_config(None, self.arguments("any")))
        plan = DataPlan.open(spec, load_tokenizer(self.tokenizer))
        for number in range(sample, sample + 100):
            for piece in trace_sample(plan, number).pieces:
                if piece.start == 0:
                    return piece.place
        raise AssertionError("no document begins there")

    def fail(self, run: str, shard: str, damage: Callable[[Path], None], at_step: int | None, *overrides: str) -> Outcome:
        """Goes on with a run on a corpus that is damaged before, or when `at_step` was recorded; then mends it."""
        arguments = self.arguments(run, *overrides)
        folder, path = RunFolder(self.folder / run), self.corpus / shard
        healthy, mark = path.read_bytes(), new_mark()
        before = find_latest(folder.checkpoints)[0]
        try:
            if at_step is None:
                damage(path)
            command = [sys.executable, "-m", "z2all_ds", "train", "--ranks", "2", *arguments]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = subprocess.Popen(command, env={**os.environ, **mark}, **pipes)  # type: ignore[call-overload]
            if at_step is not None:
                wait_until(lambda: recorded(folder) >= at_step or process.poll() is not None, "the run to train")
                damage(path)
            stdout, stderr = process.communicate(timeout=300)
            left_behind = marked(mark)
            newest = find_latest(folder.checkpoints)[0]
            assert newest is not None
            expected = [self._error_of(arguments, rank, json.loads((newest.path / "data_state.json").read_text()))
                        for rank in range(2)]
        finally:
            path.write_bytes(healthy)
        logs = [line for rank in range(2) for line in folder.rank_log(rank).read_text().splitlines()]
        result = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
        print(stderr, expected)
        errors = [line for line in logs if line.startswith("DataError")]
        return Outcome(shard, result, left_behind, recorded(folder), errors, expected, newest.step)

    def _error_of(self, arguments: list[str], rank: int, state) -> str | None:
        spec = stream_spec(load_run_config(None, arguments))
        stream = PackedStream(spec, load_tokenizer(self.tokenizer), rank, 2)
        stream.load_state_dict(state)
        try:
            for _ in stream:
                if stream.position >= STEPS * SAMPLES_PER_STEP:
                    return None
        except DataError as error:
            return f"DataError: {error}", stream.position
        raise AssertionError("a stream has no end")


def recorded(folder: RunFolder) -> int:
    return len(folder.metrics.read_bytes().splitlines()) if folder.metrics.exists() else 0

@pytest.fixture(scope="module")
def damages(tmp_path_factory: pytest.TempPathFactory, small_corpus: Path, small_tokenizer: Path) -> Damages:
    folder = tmp_path_factory.mktemp("faults")
    made = Damages(folder, short_documents(small_corpus, folder / "corpus"), small_tokenizer)
    stop = f"train.stop_at_step={STOP}"
    plan = [made.arguments("whole"), made.arguments("deleted", stop), made.arguments("garbage", stop)]
    assert train_many(folder, plan) == [0, 0, 0]
    return made

def test_x(damages):
    place = damages.first_document_of(40*8)
    o = damages.fail("deleted", place.shard, lambda p: p.unlink(), None)
    print(o)
    o = damages.fail("cut", place.shard, lambda p: os.truncate(p, p.stat().st_size//2), 25)
    print(o)
    assert 0
