"""Records how often the run has read each domain."""

from z2all_ds.track.fields import EPOCHS_PREFIX
from z2all_ds.train.hooks.hook import Hook, Step


class Coverage(Hook):
    """Adds epochs_of_X: the average over the lanes of rank 0, which differ by the tokens of a sample or so."""

    def after_step(self, step: Step) -> None:
        if self.context.world.rank == 0:
            epochs = self.context.loader.stream.epochs_read()
            step.record.update({EPOCHS_PREFIX + name: round(value, 4) for name, value in epochs.items()})
