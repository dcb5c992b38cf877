"""From tokens of documents to samples, and from samples to the columns of a batch.

A document is its tokens and one <|endoftext|>. A sample is `sequence_length` tokens of one domain: whole documents and
at most two that are cut, the first and the last. `labels[t]` is already the target of `input_ids[t]`: the next token
of the same document, also when that token is the first of the next sample. The <|endoftext|> is learnt as the end of
its document, and itself has no target: the loss never crosses a border.

Samples stay compact (four bytes a token) until they are in the process that trains; only there they are spread out to
the five columns of a batch, at ten times the size.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

NO_TARGET = -100
"""Label of a position without a target; what torch's cross-entropy ignores."""

COLUMNS = ("input_ids", "labels", "position_ids", "document_ids", "domain_ids")

Batch = dict[str, "torch.Tensor"]
"""The columns, each int64 [micro_batch_size, sequence_length]."""


class Sample(NamedTuple):
    """The tokens of one sample and where its documents end."""

    tokens: npt.NDArray[np.int32]
    """[sequence_length + 1]; the last is the one that follows, if the last piece goes on."""
    piece_lengths: list[int]
    """Of the pieces of documents in the sample, summing to its length; the last may be padding."""
    domain_index: int
    goes_on: bool
    """The last piece ends in the middle of its document."""
    num_padding: int = 0
    """Tokens at the end that stand for nothing: the last piece is padding."""


def make_batch(samples: Sequence[Sample], pin_memory: bool = False) -> Batch:
    """The columns of a batch; pinned ones are written in place, without a copy in between.

    Positions start at 0 with each piece, so also with the rest of a document that began in the sample before:
    attention cannot see that sample, and the model should not be told of a context it does not have.
    """
    import torch

    length = len(samples[0].tokens) - 1
    shape = (len(COLUMNS), len(samples), length)
    # One piece of memory for all columns, and plain memory by numpy: both save calls that cost as much as the writing.
    if pin_memory:
        block = torch.empty(shape, dtype=torch.int64, pin_memory=True)
    else:
        block = torch.from_numpy(np.empty(shape, dtype=np.int64))
    upwards = _counting_up(length)
    input_ids, all_labels, all_positions, all_documents, domain_ids = block.numpy()
    for row, sample in enumerate(samples):
        input_ids[row] = sample.tokens[:-1]
        domain_ids[row] = sample.domain_index
        labels, positions, documents = all_labels[row], all_positions[row], all_documents[row]
        labels[:] = sample.tokens[1:]
        begin = 0
        for number, size in enumerate(sample.piece_lengths):
            end = begin + size
            positions[begin:end] = upwards[:size]
            documents[begin:end] = number
            labels[end - 1] = NO_TARGET
            begin = end
        if sample.goes_on:
            labels[-1] = sample.tokens[-1]
        if sample.num_padding:
            labels[length - sample.num_padding :] = NO_TARGET
    return dict(zip(COLUMNS, block.unbind(), strict=True))


@lru_cache(maxsize=8)
def _counting_up(length: int) -> npt.NDArray[np.int64]:
    return np.arange(length)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts pieces of the given lengths (none above `capacity`) into bins: the longest first, each where it leaves the
    least room. Gives the numbers of the pieces of each bin, bins and pieces in the order in which pieces were given:
    in the order of packing, long documents would come first and all lanes would begin with them.

    Bins are found by their room through one bit an amount of room, so that a bin with the least sufficient room is a
    matter of two integer operations rather than a search.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set when some bin has room r
    for piece in sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)):
        need = lengths[piece]
        enough = rooms >> need
        if enough:
            room = need + (enough & -enough).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        left = room - need
        by_room.setdefault(left, []).append(chosen)
        rooms |= 1 << left
    return sorted(sorted(pieces) for pieces in bins)
