"""TensorBoard event files, read back with TensorBoard's own loader."""

import math
from pathlib import Path
from typing import Any

import pytest

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.tensorboard_sink import TensorBoardSink

pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")


def read_back(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(point.step, round(point.value, 3)) for point in read_back(folder).Scalars(name)]


def send(sink: TensorBoardSink, step: int, loss: float | None, moment: float) -> None:
    sink.send([{"step": step, "loss": loss, "loss_of_中文/a b": 2.0, "step_taken": True, "time_unix": moment}])


def test_repeated_steps_are_shown_once(tmp_path: Path) -> None:
    sink = TensorBoardSink(RunFolder(tmp_path))
    sink.open()
    sink.send([{"event": "started", "step": 0, "time_unix": 0.5, "hosts": ["甲"]}])
    for step in (1, 2, 3, 4):
        send(sink, step, 1 / step, float(step))
    sink.send([{"event": "spike", "step": 4, "time_unix": 4.5}])
    for step in (3, 4, 5):  # the run went back to step 2
        send(sink, step, 10.0 + step, 10.0 + step)
    assert sink.settle()
    sink.close()

    folder = tmp_path / "sinks" / "tensorboard"
    assert points(folder, "loss") == [(1, 1.0), (2, 0.5), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert points(folder, "loss_of_中文/a b")[0] == (1, 2.0)
    assert points(folder, "step_taken")[0] == (1, 1.0)
    assert [point.wall_time for point in read_back(folder).Scalars("loss")][:3] == [1.0, 2.0, 13.0]
    (spike,) = read_back(folder / "events").Tensors("events/spike")
    assert spike.step == 4
    (started,) = read_back(folder / "events").Tensors("events/started")
    assert "甲" in started.tensor_proto.string_val[0].decode()


def test_records_of_a_killed_session_are_not_shown_twice(tmp_path: Path) -> None:
    for first, last in ((1, 4), (3, 6)):  # records after step 2 were not confirmed and are sent again
        sink = TensorBoardSink(RunFolder(tmp_path))
        sink.open()
        for step in range(first, last + 1):
            send(sink, step, float(first), float(step))
        sink.close()
    found = points(tmp_path / "sinks" / "tensorboard", "loss")
    assert found == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0), (6, 3.0)]


def test_missing_values_are_left_out_and_nan_is_kept(tmp_path: Path) -> None:
    sink = TensorBoardSink(RunFolder(tmp_path))
    sink.open()
    send(sink, 1, None, 1.0)
    send(sink, 2, math.nan, 2.0)
    sink.close()
    ((step, value),) = points(tmp_path / "sinks" / "tensorboard", "loss")
    assert step == 2 and math.isnan(value)
