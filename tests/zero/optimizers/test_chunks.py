"""Pieces are views, none is larger than asked for, and batches keep what belongs together."""

import pytest
import torch

from z2all_ds.zero.optimizers.chunks import batches, flat_gradient_pieces, flat_pieces


def test_pieces_are_views() -> None:
    tensor = torch.zeros(3, 5)
    pieces = flat_pieces(tensor, 4)
    assert [piece.numel() for piece in pieces] == [4, 4, 4, 3]
    for piece in pieces:
        piece.fill_(1)
    assert torch.equal(tensor, torch.ones(3, 5))


def test_what_cannot_be_a_view_raises_where_it_is_written() -> None:
    turned = torch.zeros(3, 5).T
    with pytest.raises(RuntimeError, match="view"):
        flat_pieces(turned)
    assert [piece.numel() for piece in flat_gradient_pieces(turned, 8)] == [8, 7]


def test_batches_hold_no_more_than_asked_for() -> None:
    sizes = [3, 4, 2, 10, 1, 1]
    rows = [(torch.full((size,), float(index)), torch.full((size,), -float(index))) for index, size in enumerate(sizes)]
    found = list(batches(rows, 7))
    assert [[tensor.numel() for tensor in first] for first, _ in found] == [[3, 4], [2], [10], [1, 1]]
    flat = [pair for first, second in found for pair in zip(first, second, strict=True)]
    assert [one[0].item() for one, _ in flat] == list(range(6))
    assert all(torch.equal(one, -other) for one, other in flat)
    assert list(batches([], 7)) == []
