"""`z2all track sync`: sends what a sink has not got yet of a run, in the foreground.

It goes on with the run that W&B knows, from metrics.jsonl alone: what an offline run left in W&B's own files is not
needed for it.
"""

import shlex
import time
from pathlib import Path
from typing import Any

from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.keeper import LOOK_EVERY_SECONDS, Session
from z2all_ds.track.sinks.records import Progress, records_left
from z2all_ds.track.sinks.settings import LABELS, TENSORBOARD, WANDB, SinkSettings, has_wandb_key

PATIENCE_SECONDS = 600.0
"""For W&B's server: somebody is watching, and may give up before."""


def sync_runs(runs: list[Path], sink: str, project: str | None, offline: bool) -> None:
    """Everything is checked before the first record is sent."""
    if sink not in LABELS:
        raise ConfigError(f"--to {sink}", f"must be one of {', '.join(LABELS)}", "Choose one of these.")
    for option, given in {"--project": project is not None, "--offline": offline}.items():
        if given and sink == TENSORBOARD:
            raise ConfigError(option, "is for W&B alone", f"Leave {option} out.")
    for run in runs:
        if not RunFolder(run).metrics.exists():
            raise DataError(str(run), "no metrics.jsonl in it", "Give the folder of a run that has trained.")
    if sink == WANDB and not offline and not has_wandb_key():
        fix = "Run `wandb login` or set WANDB_API_KEY; --offline writes W&B's files without it."
        raise ConfigError("W&B", "no API key is set", fix)
    for run in runs:
        mode = "disabled" if sink == TENSORBOARD else "offline" if offline else "online"
        settings = SinkSettings(
            wandb=mode,
            tensorboard=sink == TENSORBOARD,
            project=project or _project(RunFolder(run).config),
            finish_seconds=PATIENCE_SECONDS,
            hang_seconds=PATIENCE_SECONDS,
        )
        options = [*(["--to", sink] if sink != WANDB else []), *(["--project", project] if project else [])]
        again = shlex.join(["z2all", "track", "sync", str(run), *options, *(["--offline"] if offline else [])])
        _sync_one(RunFolder(run), sink, settings, again)


def _sync_one(folder: RunFolder, sink: str, settings: SinkSettings, again: str) -> None:
    known = Progress.load(folder.sinks / f"{sink}.json")
    left = records_left(folder.metrics, known.mark(settings.place(sink), "metrics"))
    if not left:
        say(f"{folder.root}: {LABELS[sink]} has everything")
        return
    session = Session(folder, sink, settings)
    try:
        session.finish()
        with progress(f"{folder.root} to {LABELS[sink]}", left, "records") as advance:
            while True:
                for report in session.reports():
                    if report["state"] == "sent":
                        advance(report["records"])
                    elif report["state"] == "open":
                        say(f"{LABELS[sink]}: {report['seen_at']}")
                    elif report["state"] == "closing":
                        advance(0, "waiting until all of it is delivered")
                    elif report["state"] == "finished":
                        return
                    elif report["state"] == "failed":
                        raise MachineError(LABELS[sink], report["why"], f"Put that right, then run `{again}` again.")
                time.sleep(LOOK_EVERY_SECONDS)
    finally:
        session.end()


def _project(config: Path) -> str:
    import yaml

    try:
        content: Any = yaml.safe_load(config.read_text(encoding="utf-8"))
        return str(content["track"]["project"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return SinkSettings.project
