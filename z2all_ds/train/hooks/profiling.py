"""`z2all train --profile 10:15`: a trace of host and GPU for these steps, for chrome://tracing or Perfetto.

Only rank 0 is traced: one trace is large, and all ranks do the same. A run that ends inside the window writes what it
has.
"""

from typing import Any

import torch

from z2all_ds.base.config import RunConfig
from z2all_ds.train.context import TrainContext
from z2all_ds.train.hooks.hook import Hook, Step


class Profiling(Hook):
    """Does nothing outside the window and on other ranks."""

    def __init__(self, context: TrainContext) -> None:
        super().__init__(context)
        self._steps = context.run.train.profile if context.world.is_main else None
        self._device, self._say = context.engine.device, context.recorder.say
        self._profiler: Any = None
        self._last_step = 0

    @classmethod
    def is_wanted(cls, run: RunConfig) -> bool:
        return run.train.profile is not None

    def before_step(self, number: int) -> None:
        if self._steps is None or number != self._steps[0] or self._profiler is not None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._say(f"profiling steps {self._steps[0]} to {self._steps[1]}: they take longer")

    def after_step(self, step: Step) -> None:
        self._last_step = step.number
        if self._steps and step.number >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the trace recorded so far; also called after an error."""
        if self._steps is None or self._profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels still running belong to the last step
        self._profiler.stop()
        path = self.context.folder.profiles / f"steps_{self._steps[0]}-{self._last_step}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._profiler, self._steps = None, None
        self._say(f"profile: {path}")
