"""TensorBoard's event files, written with the package `tensorboard`, without torch and TensorFlow.

Each session writes a new file. A START mark makes TensorBoard drop the points from that step on. It is written at the
beginning of a file and where steps are repeated, so that unconfirmed points of a killed session do not appear twice.
Events have their own folder: a spike must stay visible after a rollback. TensorBoard's fast loader ignores the mark,
hence `--load_fast=false`.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.fields import MARKED
from z2all_ds.track.sinks.settings import SinkFailure

NOT_CURVES = ("step", "time_unix")


class TensorBoardSink:
    """Writes numbers as scalars under their names, and events as text under `events/KIND`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.sinks / "tensorboard"
        self._writer: Any = None
        self._events: Any = None
        self._last_step: int | None = None

    def open(self) -> str:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise SinkFailure(f"{error}: run `pip install 'z2all_ds[tensorboard]'`", is_permanent=True) from error
        (self._folder / "events").mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        self._events = EventFileWriter(str(self._folder / "events"))
        return f"tensorboard --load_fast=false --logdir {shlex.quote(str(self._folder))}"

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        for line in lines:
            step, wall_time = line.get("step") or self._last_step or 0, line["time_unix"]
            if "event" in line:
                if line["event"] in MARKED:
                    self._events.add_event(Event(step=step, wall_time=wall_time, summary=_text_of(line)))
                continue
            if self._last_step is None or step <= self._last_step:
                self._writer.add_event(Event(step=step, wall_time=wall_time, session_log={"status": "START"}))
            self._writer.add_event(Event(step=step, wall_time=wall_time, summary=_scalars_of(line)))
            self._last_step = step

    def settle(self) -> bool:
        self._writer.flush()
        self._events.flush()
        return True

    def close(self) -> None:
        self._writer.close()
        self._events.close()


def _scalars_of(record: dict[str, Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = [name for name, value in record.items() if isinstance(value, (int, float)) and name not in NOT_CURVES]
    return Summary(value=[{"tag": name, "simple_value": record[name]} for name in numbers])


def _text_of(event: dict[str, Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    details = {name: value for name, value in event.items() if name not in ("event", "time_unix")}
    value = Summary.Value(
        tag=f"events/{event['event']}",
        metadata=create_summary_metadata(display_name="", description=""),
        tensor=make_tensor_proto([json.dumps(details, ensure_ascii=False).encode()]),
    )
    return Summary(value=[value])
