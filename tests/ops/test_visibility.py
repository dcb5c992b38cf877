"""Visibility in attention: mask, document borders and block mask, compared with plain loops over pairs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from z2all_ds.ops.visibility import Visible, document_borders

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1]])
BORDERS = [0, 3, 5, 8, 9, 16]

sorted_rows = st.integers(1, 6).flatmap(
    lambda tokens: st.lists(
        st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens).map(sorted), min_size=1, max_size=3
    )
)


def as_mask(visible: Visible) -> Tensor:
    """Return the mask, or a causal one if `mask` returns None."""
    mask = visible.mask()
    shape = (visible.batch, 1, visible.tokens, visible.seen + visible.tokens)
    return torch.ones(shape, dtype=torch.bool).tril() if mask is None else mask


@given(data=st.data(), batch=st.integers(1, 3), tokens=st.integers(1, 6), seen=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_the_mask_agrees_with_a_plain_loop(data: st.DataObject, batch: int, tokens: int, seen: int) -> None:
    keys = seen + tokens
    rows = st.lists(st.booleans(), min_size=keys, max_size=keys)
    padding = data.draw(st.none() | st.lists(rows, min_size=batch, max_size=batch))
    documents = None
    if seen == 0:
        starts = st.lists(st.integers(0, 2), min_size=tokens, max_size=tokens).map(sorted)
        documents = data.draw(st.none() | st.lists(starts, min_size=batch, max_size=batch))
    visible = Visible(
        batch,
        tokens,
        CPU,
        seen,
        None if documents is None else torch.tensor(documents),
        None if padding is None else torch.tensor(padding),
    )
    assert visible.plain_causal == (seen == 0 and padding is None and documents is None)
    assert visible.documents_only == (documents is not None and padding is None)
    wanted = torch.zeros(batch, 1, tokens, keys, dtype=torch.bool)
    for row in range(batch):
        for query in range(tokens):
            for key in range(keys):
                allowed = key <= seen + query
                if documents is not None:
                    allowed = allowed and documents[row][query] == documents[row][key]
                if padding is not None:
                    allowed = (allowed and padding[row][key]) or key == seen + query
                wanted[row, 0, query, key] = allowed
    mask = as_mask(visible)
    assert (visible.mask() is None) == visible.plain_causal
    assert torch.equal(mask, wanted)
    assert mask.any(dim=-1).all()  # every query sees at least one key


@given(rows=sorted_rows, multiple=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_borders_split_the_tokens_into_documents(rows: list[list[int]], multiple: int) -> None:
    document_ids = torch.tensor(rows)
    borders = document_borders(document_ids, multiple)
    assert borders.dtype == torch.int32
    flat = [(row, name) for row, names in enumerate(rows) for name in names]
    starts = [place for place, one in enumerate(flat) if place == 0 or flat[place - 1] != one]
    assert borders.tolist()[: len(starts)] == starts
    # The remaining borders are those of empty documents at the end.
    assert set(borders.tolist()[len(starts) :]) == {len(flat)}
    assert (len(borders) - 1) % multiple == 0
    assert len(borders) - 1 - len(starts) < multiple


@given(rows=sorted_rows, multiple=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_borders_give_the_same_mask_as_their_document_ids(rows: list[list[int]], multiple: int) -> None:
    document_ids = torch.tensor(rows)
    batch, tokens = document_ids.shape
    from_ids = Visible(batch, tokens, CPU, document_ids=document_ids)
    from_borders = Visible(batch, tokens, CPU, cu_seqlens=document_borders(document_ids, multiple))
    assert from_borders.documents_only
    assert torch.equal(as_mask(from_ids), as_mask(from_borders))


def test_boundaries_are_computed_once_and_bound_the_longest_document() -> None:
    visible = Visible(2, 8, CPU, document_ids=DOCUMENTS)
    borders, longest = visible.boundaries()
    assert borders.tolist() == BORDERS
    assert 7 <= longest <= 8
    assert visible.boundaries()[0] is borders


def test_given_boundaries_are_returned_unchanged() -> None:
    borders = torch.tensor([*BORDERS, 16, 16], dtype=torch.int32)
    visible = Visible(2, 8, CPU, cu_seqlens=borders, max_document=7)
    assert visible.boundaries()[0] is borders
    assert visible.boundaries()[1] == 7


def test_masks_that_several_layers_need_are_created_once() -> None:
    visible = Visible(2, 8, CPU, document_ids=DOCUMENTS)
    assert visible.mask() is visible.mask()
    assert visible.block_mask() is visible.block_mask()


@pytest.mark.parametrize("documents", [None, "ids", "borders"])
def test_block_mask_allows_the_same_pairs(documents: str | None) -> None:
    # More than one block of 128, so that whole blocks can be skipped.
    lengths = [[1, 127, 130, 42], [300]]
    document_ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])
    given_as: dict[str | None, dict[str, Any]] = {
        None: {},
        "ids": {"document_ids": document_ids},
        "borders": {"cu_seqlens": document_borders(document_ids, multiple=4)},
    }
    visible = Visible(2, 300, CPU, **given_as[documents])
    block_mask = visible.block_mask()
    places = torch.arange(300)
    rows = torch.arange(2)[:, None, None].expand(2, 300, 300)
    allowed = block_mask.mask_mod(rows, 0, places[:, None].expand(2, 300, 300), places[None, :].expand(2, 300, 300))
    assert torch.equal(allowed[:, None], as_mask(visible))
    # The block mask selects exactly the blocks with an allowed pair.
    padded = torch.zeros(2, 384, 384, dtype=torch.bool)
    padded[:, :300, :300] = as_mask(visible)[:, 0]
    wanted = padded.view(2, 3, 128, 3, 128).any(dim=4).any(dim=2)
    assert torch.equal(block_mask.to_dense()[:, 0].bool(), wanted)
