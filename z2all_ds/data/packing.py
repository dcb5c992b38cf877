"""From pieces of documents to one sample: inputs, labels, positions, document numbers, domain numbers.

A document is its tokens and one <|endoftext|>. A lane lays its documents end to end and cuts the row every
`sequence_length` tokens, so no token is padded, dropped or repeated. `labels[t]` is already the target of
`input_ids[t]`: the next token of the same document, also when that token is the first of the next sample. The
<|endoftext|> is learnt as the end of its document, and itself has no target: the loss never crosses a border.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NO_TARGET = -100
"""Label of a position without a target; what torch's cross-entropy ignores."""

Int64Array = npt.NDArray[np.int64]
Sample = dict[str, Int64Array]
"""The columns of one sample, each int64 [sequence_length]."""

SAMPLE_COLUMNS = ("input_ids", "labels", "position_ids", "document_ids", "domain_ids")


class Piece(NamedTuple):
    """The tokens `start` to `end` of one document, as they go into one sample."""

    document_tokens: Int64Array
    """The whole document with its <|endoftext|>, [n]."""
    start: int
    end: int
    domain_index: int


def as_document(token_ids: Sequence[int], eot_id: int) -> Int64Array:
    """A tokenized text and its <|endoftext|>. An empty text is that one token: it was read, and it is counted."""
    document = np.empty(len(token_ids) + 1, dtype=np.int64)
    document[:-1] = token_ids
    document[-1] = eot_id
    return document


def pack_sample(pieces: Sequence[Piece], sequence_length: int) -> Sample:
    """One sample from the pieces that fill it exactly.

    Positions start at 0 with each piece, so also with the rest of a document that began in the sample before:
    attention cannot see that sample, and the model should not be told of a context it does not have.
    """
    sample = {name: np.empty(sequence_length, dtype=np.int64) for name in SAMPLE_COLUMNS}
    at = 0
    for number, (tokens, start, end, domain_index) in enumerate(pieces):
        length = end - start
        here = slice(at, at + length)
        sample["input_ids"][here] = tokens[start:end]
        followed = min(end + 1, len(tokens)) - (start + 1)  # positions that have a next token in their document
        sample["labels"][at : at + followed] = tokens[start + 1 : end + 1]
        sample["labels"][at + followed : at + length] = NO_TARGET
        sample["position_ids"][here] = np.arange(length)
        sample["document_ids"][here] = number
        sample["domain_ids"][here] = domain_index
        at += length
    assert at == sequence_length, (at, sequence_length)
    return sample
