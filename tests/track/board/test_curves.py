"""Curves of a metrics file that is sampled, read, followed, truncated and zoomed into; a soak test of 10^6 records."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.warm_python import FRESH
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.bench.board import started_board
from z2all_ds.track.board import curves as curves_module
from z2all_ds.track.board.curves import Curves
from z2all_ds.track.board.remote import Unreachable
from z2all_ds.track.files import Files
from z2all_ds.track.writer import RunWriter, drop_metrics_after

START = 1_790_000_000.0


def line(step: int, **more: Any) -> bytes:
    record = {"step": step, "tokens_seen": 1024 * step, "loss": 8 / step, **more, "time_unix": START + step}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def write(path: Path, steps: int, **more: Any) -> None:
    path.write_bytes(b"".join(line(step, **more) for step in range(1, steps + 1)))


class FarFiles(Files):
    """Files on another machine; counts the bytes that would cross the network."""

    is_remote = True
    bytes_read = 0

    def read(self, path: str, offset: int, length: int) -> bytes:
        content = super().read(path, offset, length)
        self.bytes_read += len(content)
        return content

    def lines_with(self, path: str, words: list[str], offset: int, length: int) -> list[tuple[int, bytes]]:
        return Files().lines_with(path, words, offset, length)  # searched on the other machine


def curves_of(path: Path, files: Files | None = None) -> Curves:
    return Curves(files or Files(), str(path))


def look(curves: Curves, path: Path) -> bool:
    return curves.update(Files().stats([str(path)])[1][0])


def read_all(curves: Curves, path: Path) -> Curves:
    while look(curves, path):
        pass
    return curves


def test_records_of_a_short_run_are_merged_into_points(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 10)
    curves = read_all(curves_of(path), path)
    points = curves.points(["loss", "missing"], "step", None, None, 5)
    assert points["x"].tolist() == [1.5, 3.5, 5.5, 7.5, 9.5]
    assert points["weight"].tolist() == [2] * 5
    assert points["series"]["loss"]["mean"][0] == pytest.approx((8 + 4) / 2)
    assert points["series"]["loss"]["min"].tolist() == [4, 2, 8 / 6, 1, 0.8]
    assert np.isnan(points["series"]["missing"]["mean"]).all()
    tokens = curves.points(["loss"], "tokens", 2048, 4096, 100)
    assert tokens["x"].tolist() == [2048, 3072, 4096]
    assert curves.points(["loss"], "step", 50, 60, 5)["x"].tolist() == []
    assert curves.values_at([0, 3, 11], "tokens_seen") == [0, 3072, None]


def test_a_growing_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = curves_of(path)
    assert not look(curves, path)
    assert curves.points(["loss"], "step", None, None, 5)["x"].tolist() == []
    path.write_bytes(line(1) + line(2)[:-9])
    read_all(curves, path)
    assert curves.records == 1
    path.write_bytes(line(1) + line(2) + b"no record\n" + line(3, 探针=1.0))
    read_all(curves, path)
    assert (curves.records, curves.unparsable, curves.history) == (3, 1, 0)
    assert "探针" in curves.names()
    assert [record["step"] for record in curves.recent] == [1, 2, 3]


def test_a_file_that_was_truncated_and_grew_again_is_read_from_the_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 50)
    curves = read_all(curves_of(path), path)
    path.write_bytes(b"".join(line(step) for step in range(1, 31)) + line(31, again=1) + line(32, again=1))
    assert look(curves, path)
    assert curves.history == 1
    # The old curve is shown until the new one is read.
    assert curves.points(["loss"], "step", None, None, 100)["x"][-1] == 50
    read_all(curves, path)
    assert curves.points(["loss"], "step", None, None, 100)["x"].tolist() == list(range(1, 33))
    assert [record["step"] for record in curves.recent][-2:] == [31, 32]


class BreakingFiles(Files):
    """Files behind a connection that breaks at the n-th call."""

    calls_left = 1000

    def read(self, path: str, offset: int, length: int) -> bytes:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Unreachable("the connection has ended")
        return super().read(path, offset, length)


@pytest.mark.parametrize("calls", range(1, 6))
def test_no_record_is_lost_or_repeated_when_the_connection_breaks(tmp_path: Path, calls: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 5)
    files = BreakingFiles()
    files.calls_left = calls
    curves = curves_of(path, files)
    for written in (5, 8):
        write(path, written)
        with suppress(Unreachable):
            read_all(curves, path)
        read_all(curves, path)  # nothing was written since
        assert curves.points(["loss"], "step", None, None, 100)["x"].tolist() == list(range(1, written + 1))
    assert files.calls_left <= 0
    assert [record["step"] for record in curves.recent] == list(range(1, 9))


def test_a_deleted_file_keeps_its_curves_until_it_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 5)
    curves = read_all(curves_of(path), path)
    path.unlink()
    read_all(curves, path)
    assert curves.points(["loss"], "step", None, None, 100)["x"][-1] == 5
    write(path, 3, other=1)
    read_all(curves, path)
    assert (curves.history, curves.records) == (1, 3)
    assert curves.points(["loss"], "step", None, None, 100)["x"].tolist() == [1, 2, 3]


def test_a_file_truncated_to_zero_bytes_has_no_curves(tmp_path: Path) -> None:
    """A run that starts over in its folder has no curves until its first step is done."""
    path = tmp_path / "metrics.jsonl"
    write(path, 5)
    curves = read_all(curves_of(path), path)
    path.write_bytes(b"")
    read_all(curves, path)
    assert (curves.history, curves.records, list(curves.recent), curves.first) == (1, 0, [], {})
    assert curves.points(["loss"], "step", None, None, 100)["x"].tolist() == []
    write(path, 2)
    read_all(curves, path)
    assert curves.points(["loss"], "step", None, None, 100)["x"].tolist() == [1, 2]


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with 30,000 records, some of them with a validation loss."""
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    path.write_bytes(
        b"".join(
            line(step, filler="x" * 150, **({"validation_loss": 1.0} if step % 7777 == 0 else {}))
            for step in range(1, 30_001)
        )
    )
    assert path.stat().st_size > curves_module.SAMPLE_FROM_BYTES
    return path


def test_a_long_file_is_shown_as_a_sample_until_it_is_read(long_file: Path) -> None:
    curves = curves_of(long_file)
    assert look(curves, long_file)
    assert curves.is_sample and curves.read_share < 0.5
    assert 2000 < curves.records < 10_000
    sample = curves.points(["loss"], "step", None, None, 800)
    assert sample["x"][0] < 60 and sample["x"][-1] > 29_940
    assert len(sample["x"]) > 500
    assert sample["weight"].sum() == 30_000  # a sampled record has the weight of all records it represents
    assert curves.values_at([30_000, 30_001], "tokens_seen") == [1024 * 30_000, None]
    assert curves.counted_seconds() is None
    assert curves.recent[-1]["step"] == 30_000
    read_all(curves, long_file)
    assert (curves.is_sample, curves.read_share, curves.records) == (False, 1.0, 30_000)
    # Exact, although a bucket contains several records.
    assert curves.values_at([30_000, 30_001], "tokens_seen") == [
        1024 * 30_000,
        None,
    ]
    assert curves.values_at([29_999], "time_unix", START) == [START + 29_999]
    whole = curves.points(["loss"], "step", None, None, 800)
    assert whole["weight"].sum() == 30_000
    total = float((whole["series"]["loss"]["mean"] * whole["weight"]).sum())
    assert total == pytest.approx(sum(8 / step for step in range(1, 30_001)))


def test_a_zoom_reads_the_records_again(long_file: Path) -> None:
    curves = read_all(curves_of(long_file), long_file)
    zoom = curves.points(["loss"], "step", 10_000, 10_099, 800)
    assert zoom["x"].tolist() == list(range(10_000, 10_100))
    assert zoom["series"]["loss"]["max"].tolist() == [8 / step for step in range(10_000, 10_100)]
    by_time = curves.points(["loss"], "time", START + 29_990, START + 40_000, 800)
    assert by_time["x"].tolist() == [START + step for step in range(29_990, 30_001)]
    coarse = curves.points(["loss"], "step", 5_000, 25_000, 100)
    assert len(coarse["x"]) <= 100


def test_a_long_remote_file_is_only_sampled(long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module, "REMOTE_WHOLE_BYTES", 1 << 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(long_file.read_bytes())
    files = FarFiles()
    curves = read_all(curves_of(path, files), path)
    assert curves.is_sample and curves.read_share == 1.0  # the rest is never read
    assert files.bytes_read < path.stat().st_size / 10
    seen = curves.points(["loss", "validation_loss"], "step", None, None, 20_000)
    known = ~np.isnan(seen["series"]["validation_loss"]["mean"])
    assert seen["x"][known].tolist() == [7777, 15554, 23331]
    zoom = curves.points(["loss"], "step", 20_000, 20_050, 800)
    assert zoom["x"].tolist() == list(range(20_000, 20_051))
    with path.open("ab") as file:
        file.write(line(30_001) + line(30_002))
    before = curves.records
    read_all(curves, path)
    assert curves.records == before + 2
    assert curves.points(["loss"], "step", None, None, 20_000)["x"][-1] == 30_002


def test_a_long_remote_file_is_followed_sparsely(
    long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "REMOTE_WHOLE_BYTES", 1 << 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(long_file.read_bytes())
    curves = read_all(curves_of(path, FarFiles()), path)
    kept = len(curves.points(["loss"], "step", None, None, 20_000)["x"])
    rare = {30_003: {"validation_loss": 1.0}, 30_777: {"validation_loss_of_a": 1.0}, 31_111: {"probe_首都": 0.5}}
    for first in range(30_001, 32_001, 40):
        with path.open("ab") as file:
            for step in range(first, first + 40):
                file.write(line(step, filler="x" * 150, validation_seconds=0.0, **rare.get(step, {})))
        read_all(curves, path)
    names = [name for fields in rare.values() for name in fields]
    assert (curves.is_sample, curves.read_share) == (True, 1.0)
    whole = curves.points(names, "step", None, None, 20_000)
    found = {name: whole["x"][np.isfinite(series["mean"])].tolist()[-1:] for name, series in whole["series"].items()}
    assert found == {next(iter(fields)): [step] for step, fields in rare.items()}
    assert len(whole["x"]) < kept + 1000  # new records are kept as sparsely as the sample
    assert whole["weight"].sum() == 32_000
    assert curves.values_at([32_000, 32_001], "tokens_seen") == [1024 * 32_000, None]


def test_skipped_steps_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        line(1, step_taken=True, step_seconds=2.0, data_wait_seconds=0.5)
        + line(2, step_taken=False, step_seconds=3.0, data_wait_seconds=0.25)
    )
    assert read_all(curves_of(path), path).counted_seconds() == pytest.approx(1.5)


@pytest.mark.extended
def test_soak_with_a_million_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real board follows a million records as the run's own writer writes them; then the run goes back."""
    monkeypatch.setenv(FRESH, "1")  # a new process, because its memory is measured
    records, folder = 1_000_000, RunFolder(tmp_path)
    with started_board(tmp_path) as board:

        def wait_for(wanted: int, history: int) -> None:
            run = board.get("/api/runs")[0]["runs"][0]
            while (run["records"], run["history"], run["read_share"]) != (wanted, history, 1.0):
                assert board.process.poll() is None
                time.sleep(0.3)
                run = board.get("/api/runs")[0]["runs"][0]

        writer = RunWriter(folder)
        for step in range(records):
            writer.metric(soak_record(step, 1_790_000_000.25))
        writer.close()
        wait_for(records, history=0)
        answer, _ = board.get("/api/curves?run=0&names=loss&points=1000")
        before = peak_of_process()
        assert drop_metrics_after(folder.metrics, records // 2 - 1) == records // 2
        writer = RunWriter(folder)
        writer.metric(soak_record(records // 2, 1_791_000_000.25))
        writer.close()
        assert peak_of_process() < before + 20e6  # only the end of the file was read
        wait_for(records // 2 + 1, history=1)
        assert peak_of_process(board.process.pid) < 200e6
    loss = answer["series"]["loss"]
    assert sum(answer["weight"]) == records
    total = sum(mean * weight for mean, weight in zip(loss["mean"], answer["weight"], strict=True))
    assert total == pytest.approx(records * (499.5 + 0.5), rel=1e-12)
    assert (min(loss["min"]), max(loss["max"])) == (0.5, 999.5)
    assert answer["x"] == sorted(answer["x"])


def soak_record(step: int, begun_unix: float) -> dict[str, float]:
    loss = step % 1000 + 0.5
    return {"step": step, "tokens_seen": 65536 * step, "loss": loss, "lr": 3e-4, "time_unix": begun_unix + step}
