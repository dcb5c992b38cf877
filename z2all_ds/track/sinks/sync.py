"""`z2all track sync`: sends the records of a run that a sink is missing, in the foreground.

It continues the existing W&B run. It reads metrics.jsonl; W&B's own offline files are not needed.
"""

import shlex
import time
from pathlib import Path

from z2all_ds.base.console import progress, say
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.track.sinks.feed import SinkProcess, unconfirmed
from z2all_ds.track.sinks.settings import LABELS, TENSORBOARD, WANDB, SinkSettings, has_wandb_key
from z2all_ds.track.sinks.wandb_sink import run_config

PATIENCE_SECONDS = 600.0
"""For W&B's server; the user can stop it earlier."""


def sync_runs(runs: list[Path], sink: str, project: str | None, offline: bool) -> None:
    """Send the missing records of all runs. Check everything before the first record is sent."""
    if sink not in LABELS:
        raise ConfigError(f"--to {sink}", f"must be one of {', '.join(LABELS)}", "Choose one of these.")
    for option, given in {"--project": project is not None, "--offline": offline}.items():
        if given and sink == TENSORBOARD:
            raise ConfigError(option, "only applies to W&B", f"Leave out {option}.")
    for run in runs:
        if not RunFolder(run).metrics.exists():
            raise DataError(str(run), "has no metrics.jsonl", "Give the folder of a run that has trained.")
    if sink == WANDB and not offline and not has_wandb_key():
        fix = "Run `wandb login` or set WANDB_API_KEY; --offline writes W&B's files without it."
        raise ConfigError("W&B", "no API key is set", fix)
    mode = "disabled" if sink == TENSORBOARD else "offline" if offline else "online"
    options = [*(["--to", sink] if sink != WANDB else []), *(["--project", project] if project else [])]
    for run in runs:
        track = run_config(RunFolder(run)).get("track")
        own = track.get("project") if isinstance(track, dict) else None
        name = project or (own if isinstance(own, str) and own else SinkSettings.project)
        settings = SinkSettings(mode, sink == TENSORBOARD, name, PATIENCE_SECONDS, PATIENCE_SECONDS)
        again = shlex.join(["z2all", "track", "sync", str(run), *options, *(["--offline"] if offline else [])])
        _sync_one(RunFolder(run), sink, settings, again)


def _sync_one(folder: RunFolder, sink: str, settings: SinkSettings, again: str) -> None:
    left = unconfirmed(folder, sink, settings)
    if not left:
        say(f"{folder.root}: {LABELS[sink]} has everything")
        return
    session = SinkProcess(folder, sink, settings, say)
    session.ask_to_end()
    session.start()
    try:
        with progress(f"{folder.root} to {LABELS[sink]}", left, "records") as advance:
            while True:
                for report in session.reports():
                    if report["state"] == "sent":
                        advance(report["records"])
                    elif report["state"] == "open":
                        say(f"{LABELS[sink]}: {report['message']}")
                    elif report["state"] == "closing":
                        advance(0, "waiting until everything is delivered")
                    elif report["state"] == "finished":
                        return
                    elif report["state"] == "failed":
                        raise MachineError(LABELS[sink], report["message"], f"Fix it, then run `{again}` again.")
                time.sleep(0.1)
    finally:
        session.kill()
