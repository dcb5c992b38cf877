"""Large tensors in pieces: ZeRO hands over all weights as one tensor, and temporaries must not be as large."""

from collections.abc import Iterator, Sequence

from torch import Tensor

CHUNK = 1 << 24
"""Values stepped at a time: a temporary in fp32 has 64 MiB, whatever the size of the partition."""


def flat_pieces(tensor: Tensor, size: int = CHUNK) -> tuple[Tensor, ...]:
    """Flat views of at most `size` values, to be written to. A tensor with gaps or turned axes raises."""
    return tensor.view(-1).split(size)


def flat_gradient_pieces(tensor: Tensor, size: int = CHUNK) -> tuple[Tensor, ...]:
    """The same for a tensor that is only read and may have any strides."""
    return tensor.reshape(-1).split(size)


def batches(rows: Sequence[tuple[Tensor, ...]], size: int = CHUNK) -> Iterator[list[list[Tensor]]]:
    """Rows of tensors that belong together, taken up to `size` values at a time; yields columns for foreach calls."""
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
