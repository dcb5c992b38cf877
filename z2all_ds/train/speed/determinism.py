"""`train.deterministic`: repeated runs give the same bits, on a GPU too.

On a GPU, some kernels add in a varying order, above all in the backward pass of attention, and two runs of the same
config diverge. With this setting torch uses deterministic kernels, or names the op that has none; this package's
kernels are deterministic. On a CPU runs are always reproducible.
"""

import os


def prepare(deterministic: bool) -> None:
    """Set up cuBLAS before torch is loaded: it is deterministic only with a workspace of fixed size."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def enforce(deterministic: bool) -> None:
    """Set or reset the mode for this process, which may run several trainings one after the other."""
    import torch

    torch.use_deterministic_algorithms(deterministic)
    # Otherwise every `torch.empty` is filled to reveal reads of uninitialized memory; kernel tests cover that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
