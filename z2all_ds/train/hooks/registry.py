"""The hooks of a training run, in the order in which the loop calls them."""

from z2all_ds.train.context import TrainContext
from z2all_ds.train.hooks.communication import CommunicationMeter
from z2all_ds.train.hooks.coverage import Coverage
from z2all_ds.train.hooks.exports import BackgroundExports
from z2all_ds.train.hooks.garbage import GarbageCollection
from z2all_ds.train.hooks.hook import Hook
from z2all_ds.train.hooks.probing import Probing
from z2all_ds.train.hooks.profiling import Profiling
from z2all_ds.train.hooks.spikes import SpikeHandling
from z2all_ds.train.hooks.validation import Validation

HOOKS: tuple[type[Hook], ...] = (
    Profiling,
    Validation,
    Probing,
    Coverage,
    CommunicationMeter,  # after hooks that use collectives themselves
    GarbageCollection,
    SpikeHandling,
    BackgroundExports,
)


def make_hooks(context: TrainContext) -> list[Hook]:
    """Return the hooks that this run uses."""
    return [kind(context) for kind in HOOKS if kind.is_wanted(context.run)]
