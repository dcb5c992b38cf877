"""The state, and the reason of a failure, that W&B shows for a run after the end of a session."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.records import Progress
from z2all_ds.track.sinks.settings import SinkSettings
from z2all_ds.track.sinks.wandb_sink import WandbSink
from z2all_ds.track.writer import RunWriter


@pytest.mark.parametrize(
    ("outcomes", "exit_code"),
    [
        ([], 1),
        (["started"], 1),  # killed: the failure is recorded after the session
        (["started", "checkpoint"], 1),
        (["started", "failed"], 1),
        (["started", "done", "started"], 1),
        (["started", "done"], 0),
        (["started", "stopped", "checkpoint"], 0),
        (["started", "failed", "started", "requeue"], 0),
    ],
)
def test_only_a_run_that_has_recorded_a_good_end_succeeds(outcomes: list[str], exit_code: int, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = RunWriter(folder)
    for outcome in outcomes:
        writer.event(outcome, **({"reason": "out of memory"} if outcome == "failed" else {}))
    writer.close()
    found: list[int] = []
    sink = WandbSink(folder, SinkSettings("offline", False, "project", 1.0, 1.0), Progress(tmp_path / "p", {}, {}))
    sink._run = SimpleNamespace(finish=lambda exit_code: found.append(exit_code), summary={})
    sink._stderr = SimpleNamespace(has_lost=False)  # type: ignore[assignment]
    sink.close()
    assert found == [exit_code]
    reason = "out of memory" if outcomes[-1:] == ["failed"] else None  # a later start removes it
    assert sink._run.summary == ({"failed": reason} if "failed" in outcomes else {})
