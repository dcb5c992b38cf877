"""One W&B session: a run of W&B's that is opened once, or gone on with, and given records.

The run's id is made once and kept, so that a session after a crash, after a restart of training, and `track sync` go on
with the same run. W&B's own step must only grow while ours go back after a rollback: curves are drawn over the field
`step`, and W&B's own is ours as long as that grows.

What W&B has taken is not yet safe: its service keeps up to 32 KiB in memory (offline) or sends later (online). Where it
is killed, calls first succeed and then raise; where it hangs, they succeed until a buffer is full. So records count as
delivered when a session has ended well; else the next one sends them again, apart from those that the server says it
has. A row that is there twice changes no curve.
"""

import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.records import Progress
from z2all_ds.track.sinks.settings import WANDB, SinkFailure, SinkSettings, has_wandb_key

MARKED_EVENTS = ("started", "stage", "checkpoint", "spike", "rolled_back", "fault", "recovered")
LOSS_WORDS = "will not be synced"
"""In W&B's warning that it has given up uploading."""
NEVER_SECONDS = 1e6
"""The keeper ends a session that does not answer; W&B itself is to wait."""


class WandbSink:
    """Events become series `events/KIND`: how often since the last record."""

    def __init__(self, folder: RunFolder, settings: SinkSettings, progress: Progress) -> None:
        self._folder, self._settings, self._progress = folder, settings, progress
        self._run: Any = None
        self._overheard = _Overheard(sys.stderr)
        self._row = -1
        """W&B's own number of the last row, sent or about to be."""
        self._server_has_until = -1
        self._events: Counter[str] = Counter()
        self._last_step = 0
        facts = progress.facts
        facts.setdefault("id", secrets.token_hex(4))
        place = facts.setdefault(settings.place(WANDB), {"row": -1, "logged_until_unix": 0.0, "shifts": []})
        self._place: dict[str, Any] = place
        """`shifts`: [from this moment on, row minus step], so that the row of every record sent before is known."""

    def open(self) -> str:
        online = self._settings.wandb == "online"
        if online and not has_wandb_key():
            raise SinkFailure("no API key is set: `wandb login` sets one")
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise SinkFailure(f"{error}: `pip install wandb` would help", for_good=True) from error
        sys.stderr = cast(TextIO, self._overheard)
        self._progress.save()  # the id first: a run that W&B knows must be found again
        self._run = wandb.init(
            project=self._settings.project,
            name=os.environ.get("WANDB_NAME") or self._folder.root.absolute().name,
            id=self._progress.facts["id"],
            resume="allow",
            mode="online" if online else "offline",
            dir=self._folder.sinks,
            config=_run_config(self._folder.config),
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
        self._row = self._place["row"]
        if self._run.resumed:
            self._server_has_until = self._run.starting_step - 1
            self._row = max(self._row, self._server_has_until)
        return str(self._run.url) if online else f"{self._folder.sinks / 'wandb'} (offline)"

    def send(self, lines: Sequence[dict[str, Any]]) -> None:
        """What is about to be sent is written down first: after a kill it is known which rows the server may have."""
        planned = [None if "event" in line else self._plan(line) for line in lines]
        self._progress.save()
        for line, row in zip(lines, planned, strict=True):
            if "event" in line:
                if line["event"] in MARKED_EVENTS:
                    self._events[line["event"]] += 1
            elif row is None:
                self._events.clear()  # they are there, too
            else:
                self._log(line, row)
                self._last_step = line["step"]

    def _plan(self, record: dict[str, Any]) -> int | None:
        """The row of W&B's that the record gets; None where the server has it."""
        step, moment = record["step"], record["time_unix"]
        sent_before = moment <= self._place["logged_until_unix"]
        row = step + self._shift_at(moment) if sent_before else step
        if sent_before and row <= self._server_has_until:
            return None
        row = max(row, self._row + 1)
        self._row = row
        if not sent_before:
            if row - step != self._shift_at(moment):
                self._place["shifts"].append([moment, row - step])
            self._place["logged_until_unix"] = moment
        return row

    def settle(self) -> bool:
        """By asking for something that W&B's service must answer after it has taken everything before."""
        self._run.summary.get("step")
        self._refuse_losses()
        return False

    def close(self) -> None:
        if self._events:
            self._row += 1
            self._log({"step": self._last_step}, self._row)
        self._run.finish()
        self._refuse_losses()
        self._place["row"] = self._row

    def _refuse_losses(self) -> None:
        """W&B gives up uploading where its server refuses something, and ends well all the same."""
        if self._overheard.heard_of_loss:
            raise SinkFailure("its server has refused records")

    def _shift_at(self, moment: float) -> int:
        return next((int(shift) for begin, shift in reversed(self._place["shifts"]) if begin <= moment), 0)

    def _log(self, fields: dict[str, Any], row: int) -> None:
        marks = {f"events/{kind}": count for kind, count in self._events.items()}
        self._events.clear()
        known = {name: value for name, value in fields.items() if value is not None}
        self._run.log({**known, **marks}, step=row, commit=True)


class _Overheard:
    """A stream that everything is passed on to, and in which a loss of records is noticed: W&B only prints it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.heard_of_loss = False

    def write(self, text: str) -> int:
        if LOSS_WORDS in text:
            self.heard_of_loss = True
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run_config(path: Path) -> dict[str, Any]:
    import yaml

    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, yaml.YAMLError):
        return {}
