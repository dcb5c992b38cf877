"""Gather and broadcast of small Python objects."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, on every rank."""
    found: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]  # none is left out


def from_rank_0(value: T) -> T:
    """Return the value of rank 0, on every rank."""
    found: list[T] = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]
