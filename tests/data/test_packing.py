"""What stands in a sample, worked out by hand and then for random documents."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpus_maker import assert_same
from z2all_ds.data.packing import NO_TARGET, Piece, as_document, pack_sample

EOT = 0


def test_sample_by_hand() -> None:
    """The rest of one document, a whole one, an empty one, and the beginning of one that goes on."""
    first, second = as_document([11, 12, 13, 14], EOT), as_document([21, 22], EOT)
    third, fourth = as_document([], EOT), as_document([31, 32, 33], EOT)
    pieces = [Piece(first, 3, 5, 2), Piece(second, 0, 3, 0), Piece(third, 0, 1, 1), Piece(fourth, 0, 2, 0)]
    expected = {
        "input_ids": [14, EOT, 21, 22, EOT, EOT, 31, 32],
        "labels": [EOT, NO_TARGET, 22, EOT, NO_TARGET, NO_TARGET, 32, 33],
        "position_ids": [0, 1, 0, 1, 2, 0, 0, 1],
        "document_ids": [0, 0, 1, 1, 1, 2, 3, 3],
        "domain_ids": [2, 2, 0, 0, 0, 1, 0, 0],
    }
    sample = pack_sample(pieces, 8)
    assert_same(sample, {name: np.array(column) for name, column in expected.items()})
    assert all(column.dtype == np.int64 for column in sample.values())


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=20), sequence_length=st.integers(1, 17))
def test_cut_anywhere_nothing_is_lost(lengths: list[int], sequence_length: int) -> None:
    """Documents cut into samples of any length give the same row of inputs and labels as uncut."""
    documents = [as_document(range(100 * n + 1, 100 * n + 1 + length), EOT) for n, length in enumerate(lengths)]
    row = np.concatenate(documents)
    labels = np.concatenate([np.append(document[1:], NO_TARGET) for document in documents])
    pieces: list[list[Piece]] = [[]]
    missing = sequence_length
    for number, document in enumerate(documents):
        start = 0
        while start < len(document):
            end = min(start + missing, len(document))
            pieces[-1].append(Piece(document, start, end, number % 3))
            missing -= end - start
            start = end
            if missing == 0:
                pieces.append([])
                missing = sequence_length
    samples = [pack_sample(some, sum(piece.end - piece.start for piece in some)) for some in pieces if some]
    np.testing.assert_array_equal(np.concatenate([sample["input_ids"] for sample in samples]), row)
    np.testing.assert_array_equal(np.concatenate([sample["labels"] for sample in samples]), labels)
    for sample in samples:
        restarts = np.flatnonzero(sample["position_ids"] == 0)
        new_documents = np.flatnonzero(np.diff(sample["document_ids"], prepend=-1))
        np.testing.assert_array_equal(restarts, new_documents)
        assert (np.diff(sample["document_ids"]) >= 0).all()
        # A label never belongs to another document than its input.
        targets = sample["labels"] != NO_TARGET
        assert (sample["input_ids"][targets] != EOT).all()
        assert (sample["input_ids"][~targets] == EOT).all()
