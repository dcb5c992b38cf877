"""Tests of pieces and batches of large tensors: pieces are views of limited size, and batches keep rows together."""

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


def test_a_noncontiguous_tensor_is_refused_for_writing_but_not_for_reading() -> None:
    turned = torch.zeros(3, 5).T
    with pytest.raises(RuntimeError, match="view"):
        flat_pieces(turned)
    assert [piece.numel() for piece in flat_gradient_pieces(turned, 8)] == [8, 7]


def test_batches_hold_at_most_the_given_number_of_values_unless_one_row_is_larger() -> None:
    sizes = [3, 4, 2, 10, 1, 1]
    rows = [(torch.full((size,), float(index)), torch.full((size,), -float(index))) for index, size in enumerate(sizes)]
    found = list(batches(rows, 7))
    assert [[tensor.numel() for tensor in first] for first, _ in found] == [[3, 4], [2], [10], [1, 1]]
    flat = [pair for first, second in found for pair in zip(first, second, strict=True)]
    assert [one[0].item() for one, _ in flat] == list(range(6))
    assert all(torch.equal(one, -other) for one, other in flat)
    assert list(batches([], 7)) == []
