"""One session of TensorBoard's event files, written by the package `tensorboard` alone: no torch, no TensorFlow.

Every session writes a file of its own. It begins with a mark that tells TensorBoard to forget the steps from there on,
and so does every step that is taken again: what a killed session wrote and nobody confirmed is not shown twice. Events
are in a folder of their own, as a spike is to be seen after the run went back behind it. TensorBoard's other, faster
reader knows nothing of that mark, and forgets less of the figures and more of the events: so `--load_fast=false`.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.settings import SinkFailure

NOT_CURVES = ("step", "time_unix")
SHOWN_EVENTS = ("started", "stage", "checkpoint", "spike", "rolled_back", "fault", "recovered", "stopped", "done")


class TensorBoardSink:
    """Numbers become scalars under their names, events text under `events/KIND`."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.sinks / "tensorboard"
        self._writer: Any = None
        self._events: Any = None
        self._last_step: int | None = None

    def open(self) -> str:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            way = "`pip install 'z2all_ds[tensorboard]'` would help"
            raise SinkFailure(f"{error}: {way}", for_good=True) from error
        (self._folder / "events").mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        self._events = EventFileWriter(str(self._folder / "events"))
        return f"tensorboard --load_fast=false --logdir {shlex.quote(str(self._folder))}"

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            self._event(line) if "event" in line else self._record(line)

    def _record(self, record: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        step = record["step"]
        if self._last_step is None or step <= self._last_step:
            self._forget_from(step, record["time_unix"])
        self._last_step = step
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in record.items()
            if name not in NOT_CURVES and isinstance(value, (int, float))
        ]
        _add(self._writer, step, record["time_unix"], summary=Summary(value=values))

    def _event(self, event: dict[str, Any]) -> None:
        if event["event"] not in SHOWN_EVENTS:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        details = {name: value for name, value in event.items() if name not in ("event", "time_unix")}
        value = Summary.Value(
            tag=f"events/{event['event']}",
            metadata=create_summary_metadata(display_name="", description=""),
            tensor=make_tensor_proto([json.dumps(details, ensure_ascii=False).encode()]),
        )
        step = event.get("step") or self._last_step or 0
        _add(self._events, step, event["time_unix"], summary=Summary(value=[value]))

    def settle(self) -> bool:
        self._writer.flush()
        self._events.flush()
        return True

    def close(self) -> None:
        self._writer.close()
        self._events.close()

    def _forget_from(self, step: int, time_unix: float) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        _add(self._writer, step, time_unix, session_log=SessionLog(status=SessionLog.START))


def _add(writer: Any, step: int, time_unix: float, **content: Any) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer.add_event(Event(step=step, wall_time=time_unix, **content))
