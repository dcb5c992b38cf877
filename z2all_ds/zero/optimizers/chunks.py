"""Processing of large tensors in pieces: ZeRO passes all weights as one tensor, and temporaries must stay small."""

from collections.abc import Iterator, Sequence

from torch import Tensor

CHUNK = 1 << 24
"""Values updated at a time: an fp32 temporary takes 64 MiB, whatever the size of the partition."""


def flat_pieces(tensor: Tensor, size: int = CHUNK) -> tuple[Tensor, ...]:
    """Return writable flat views of at most `size` values. Raises for tensors that are not contiguous."""
    return tensor.view(-1).split(size)


def flat_gradient_pieces(tensor: Tensor, size: int = CHUNK) -> tuple[Tensor, ...]:
    """Return flat pieces of a tensor that is only read and may have any strides."""
    return tensor.reshape(-1).split(size)


def batches(rows: Sequence[tuple[Tensor, ...]], size: int = CHUNK) -> Iterator[list[list[Tensor]]]:
    """Group rows of related tensors into batches of up to `size` values; yield columns for foreach calls."""
    batch: list[tuple[Tensor, ...]] = []
    values = 0
    for row in rows:
        if batch and values + row[0].numel() > size:
            yield [list(column) for column in zip(*batch, strict=True)]
            batch, values = [], 0
        batch.append(row)
        values += row[0].numel()
    if batch:
        yield [list(column) for column in zip(*batch, strict=True)]
