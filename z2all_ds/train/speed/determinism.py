"""`train.deterministic`: the same run twice gives the same bits, on a GPU too.

There, sums are formed in whatever order threads come, in attention's backward pass above all, and two runs of one
config drift apart. torch then takes other kernels, or says which one it has no other for; ours have no such sums. On a
CPU nothing changes: runs repeat bit for bit anyway.
"""

import os


def prepare(deterministic: bool) -> None:
    """Before torch is loaded: cuBLAS splits its sums alike only with work space of a fixed size."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def enforce(deterministic: bool) -> None:
    """For this process, and also taken back: several trainings may follow each other in one."""
    import torch

    torch.use_deterministic_algorithms(deterministic)
    # Else every `torch.empty` is filled, to show reads of what nobody wrote: the kernels' tests look for those.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
