"""Weights & Biases beside metrics.jsonl. A sink that fails warns once and goes quiet; training never notices."""

from collections.abc import Callable
from typing import Any

from z2all_ds.config import RunConfig
from z2all_ds.config_sections import TrackSection


class WandbSink:
    """Sends the step records to W&B; `disabled` costs nothing, not even the import."""

    def __init__(self, track: TrackSection, run: RunConfig, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._run: Any = None
        if track.wandb == "disabled":
            return

        def start() -> None:
            import wandb

            self._run = wandb.init(
                project=track.project,
                mode=track.wandb,
                dir=run.run_dir,
                config=run.model_dump(mode="json"),
                resume="allow",
            )

        self._guard(start)

    def metric(self, record: dict[str, Any]) -> None:
        if self._run is not None:
            self._guard(lambda: self._run.log(record, step=record["step"]))

    def close(self) -> None:
        if self._run is not None:
            self._guard(self._run.finish)

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever W&B raises, the run goes on
            self._run = None
            self._warn(f"W&B switched off for this run: {type(error).__name__}: {error}")
