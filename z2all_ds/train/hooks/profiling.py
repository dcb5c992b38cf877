"""`z2all train --profile 10:15`: what host and GPU did in these steps, as a trace for chrome://tracing or Perfetto.

Rank 0's alone: one rank's trace is large enough, and all do the same. A run that ends inside the window writes what it
has.
"""

from collections.abc import Callable
from typing import Any

import torch

from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import World


class ProfileWindow:
    """Told of every step; does nothing outside the window and on other ranks."""

    def __init__(
        self,
        steps: tuple[int, int] | None,
        folder: RunFolder,
        world: World,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._steps = steps if world.is_main else None
        self._folder, self._device, self._say = folder, device, say
        self._profiler: Any = None
        self._last_step = 0

    def before_step(self, step: int) -> None:
        """`step` is the number of the one to come, from 1 on."""
        if self._steps is None or step != self._steps[0] or self._profiler is not None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._say(f"profiling steps {self._steps[0]} to {self._steps[1]}: they take longer")

    def after_step(self, step: int) -> None:
        self._last_step = step
        if self._steps and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Writes what there is; also after an error."""
        if self._steps is None or self._profiler is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels still running belong to the last step
        self._profiler.stop()
        path = self._folder.profiles / f"steps_{self._steps[0]}-{self._last_step}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))
        self._profiler, self._steps = None, None
        self._say(f"profile: {path}")
