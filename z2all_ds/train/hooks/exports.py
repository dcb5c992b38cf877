"""Exports of checkpoints during training (`export.every_steps`), in a child process of rank 0."""

from z2all_ds.base.config import RunConfig
from z2all_ds.export.in_background import BackgroundExport
from z2all_ds.train.context import TrainContext
from z2all_ds.train.hooks.hook import Hook, Step


class BackgroundExports(Hook):
    """Rank 0 starts exports and reports them; other ranks do nothing."""

    def __init__(self, context: TrainContext) -> None:
        super().__init__(context)
        export = context.run.export
        self._exports = BackgroundExport(context.folder, export.dtype, export.format) if context.world.is_main else None

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        return run.export.every_steps > 0

    def on_checkpoint(self, step: int, name: str) -> None:
        if self._exports and step % self.context.run.export.every_steps == 0:
            self._say(self._exports.start(self.context.folder.checkpoints / name))

    def after_record(self, step: Step) -> None:
        if self._exports:
            self._say(*self._exports.poll())

    def on_end(self, outcome: str) -> None:
        # Do not delay a requested stop for an export, which can be made later.
        if self._exports and outcome != "requeue":
            self._say(*self._exports.finish())

    def close(self) -> None:
        if self._exports:
            self._exports.close()

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.context.recorder.say(line)
