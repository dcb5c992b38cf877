"""One W&B session: opens or resumes the W&B run and logs records.

The id of the W&B run is created once and saved, so that every later session and `track sync` continue the same run.
W&B's own step (the row) must increase, while our steps go back after a rollback. So curves are drawn over the field
`step`, and the row equals the step as long as steps increase.

Records that W&B has taken are not yet safe: its service keeps up to 32 KiB in memory (offline) or sends later (online).
If the service is killed or hangs, calls still succeed for a while. So records count as delivered after a clean end of a
session; otherwise the next session sends them again, except rows that the server has. A repeated row changes no curve.
"""

import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO, cast

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.base.url_passwords import without_passwords
from z2all_ds.base.yaml_text import load_yaml
from z2all_ds.track.sinks.records import Progress
from z2all_ds.track.sinks.settings import WANDB, SinkFailure, SinkSettings, has_wandb_key
from z2all_ds.track.writer import OUTCOMES, read_records

MARKED_EVENTS = ("started", "stage", "checkpoint", "spike", "rolled_back", "fault", "recovered", "failed")
GOOD_ENDS = ("stopped", "requeue", "done")
"""Outcomes of a run that has not failed."""
LOSS_WARNING = "will not be synced"
"""Part of W&B's warning that it has stopped uploading."""
NEVER_SECONDS = 1e6
"""W&B must not time out: a session that hangs is ended."""


class WandbSink:
    """Logs records, and events as series `events/KIND`: their number since the last record."""

    def __init__(self, folder: RunFolder, settings: SinkSettings, progress: Progress) -> None:
        self._folder, self._settings, self._progress = folder, settings, progress
        self._run: Any = None
        self._row = self._server_has_until = -1
        """The last row assigned to a record, and the last that the server has."""
        self._events: Counter[str] = Counter()
        self._last_step = 0
        progress.facts.setdefault("id", secrets.token_hex(4))
        self._logged: dict[str, Any] = progress.facts.setdefault(
            settings.destination(WANDB), {"row": -1, "logged_until_unix": 0.0, "shifts": []}
        )
        """`shifts`: [from this time on, row minus step], which gives the row of every record sent before."""

    def open(self) -> str:
        online = self._settings.wandb == "online"
        if online and not has_wandb_key():
            raise SinkFailure("no API key: run `wandb login`")
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise SinkFailure(f"{error}: run `pip install wandb`", is_permanent=True) from error
        self._stderr = _StderrWatch(sys.stderr)
        sys.stderr = cast(TextIO, self._stderr)
        self._progress.save()  # the id, before W&B knows the run
        self._run = wandb.init(
            project=self._settings.project,
            name=os.environ.get("WANDB_NAME") or self._folder.root.absolute().name,
            id=self._progress.facts["id"],
            resume="allow",
            mode="online" if online else "offline",
            dir=self._folder.sinks,
            config=run_config(self._folder),
            settings=wandb.Settings(
                console="off",
                silent=False,
                show_warnings=True,
                summary_timeout=NEVER_SECONDS,
                disable_git=True,
                disable_code=True,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._run.resumed:
            self._server_has_until = self._run.starting_step - 1
        self._row = max(self._logged["row"], self._server_has_until)
        return str(self._run.url) if online else f"{self._folder.sinks / 'wandb'} (offline)"

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """Save the assigned rows before it logs: after a kill, it is known which rows the server may have."""
        rows = [None if "event" in line else self._assign_row(line) for line in lines]
        if lines:
            self._progress.save()
        for line, row in zip(lines, rows, strict=True):
            if "event" in line:
                if line["event"] in MARKED_EVENTS:
                    self._events[line["event"]] += 1
            elif row is None:
                self._events.clear()  # the server has them too
            else:
                self._log(line, row)
                self._last_step = line["step"]

    def _assign_row(self, record: dict[str, Any]) -> int | None:
        """Return the row of a record; None if the server has it."""
        step, time_unix = record["step"], record["time_unix"]
        shift = next((shift for begin, shift in reversed(self._logged["shifts"]) if begin <= time_unix), 0)
        sent_before = time_unix <= self._logged["logged_until_unix"]
        if sent_before and step + shift <= self._server_has_until:
            return None
        self._row = max(step + shift if sent_before else step, self._row + 1)
        if not sent_before:
            if self._row - step != shift:
                self._logged["shifts"].append([time_unix, self._row - step])
            self._logged["logged_until_unix"] = time_unix
        return self._row

    def settle(self) -> bool:
        """Request a value, which W&B's service returns only after it has taken everything before."""
        self._run.summary.get("step")
        self._check_losses()
        return False

    def close(self) -> None:
        if self._events:
            self._row += 1
            self._log({"step": self._last_step}, self._row)
        outcomes = [event for event in read_records(self._folder.events) if event.get("event") in OUTCOMES]
        last = outcomes[-1] if outcomes else {}
        if any(event["event"] == "failed" for event in outcomes):
            self._run.summary["failed"] = last.get("reason")  # none after a later start
        # The session of a killed run ends before its launcher records the failure.
        self._run.finish(exit_code=int(last.get("event") not in GOOD_ENDS))
        self._check_losses()
        self._logged["row"] = self._row

    def _check_losses(self) -> None:
        """Raise an error if W&B has stopped uploading, which it only reports as a warning."""
        if self._stderr.has_lost:
            raise SinkFailure("its server has rejected records")

    def _log(self, fields: dict[str, Any], row: int) -> None:
        marks = {f"events/{kind}": count for kind, count in self._events.items()}
        self._events.clear()
        known = {name: value for name, value in fields.items() if value is not None}
        self._run.log({**known, **marks}, step=row, commit=True)


class _StderrWatch:
    """Forwards everything to a stream and notices the warning that W&B has lost records."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.has_lost = False

    def write(self, text: str) -> int:
        self.has_lost |= LOSS_WARNING in text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_config(folder: RunFolder) -> dict[str, Any]:
    """Read the run's config, without passwords in URLs; return {} if that fails."""
    try:
        return dict(without_passwords(load_yaml(read_regular(folder.config)) or {}))
    except (OSError, ValueError, TypeError):
        return {}
