"""From tokens of documents to samples by one of two packers, and from samples to the columns of a batch.

A document is its tokens and one <|endoftext|>. A sample is `sequence_length` tokens of one domain: whole documents and
at most two that are cut, the first and the last. `labels[t]` is already the target of `input_ids[t]`: the next token
of the same document, also when that token is the first of the next sample. The <|endoftext|> is learnt as the end of
its document, and itself has no target: the loss never crosses a border.

"cut" lays the documents end to end and cuts every `sequence_length` tokens: no token is padded, dropped or repeated.
"best_fit" takes documents in groups and packs the documents of a group whole, the longest first; only those longer than
a sample are cut, and the room that is left is padding.

Samples stay compact (four bytes a token) until they are in the process that trains; only there they are spread out to
the five columns of a batch, at ten times the size.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from z2all_ds.base.errors import DataError
from z2all_ds.data.documents import Run, TokenArray
from z2all_ds.data.lane_documents import DocumentSpan, LaneDocuments

if TYPE_CHECKING:
    import torch


PACKING_MODES = ("cut", "best_fit")
SAMPLES_PER_GROUP = 64
"""Of "best_fit". On real text in samples of 2048 tokens 2.7 % are padding with groups of 32, 1.7 % with 64, 1.2 % with
128; a resume reads the group again, and a lane holds one of each domain."""

Cursor = list[int]
"""Position of a lane in a domain. Its first two numbers are the block of the lane (0, 1, 2, ...) and the place in it;
then, for "cut", the tokens already given of that document; for "best_fit", (sequence length, samples given) of the
group that begins there, with one more pair for each change of length within it."""

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


def fresh_cursor(packing: str) -> Cursor:
    return [0, 0, 0] if packing == "cut" else [0, 0]


class CutPacker:
    """Makes samples of the documents of one lane: end to end, cut every `sequence_length` tokens."""

    def __init__(self, row: LaneDocuments, domain_index: int, cursor: Cursor) -> None:
        self._row, self._domain_index, self._given = row, domain_index, cursor[2]
        self._run: Run | None = None
        self._at = 0  # tokens given of the run
        self._document = 0  # number of the present document in the run; the row stands at the run's first

    def next_sample(self, sequence_length: int, pieces: list[DocumentSpan] | None = None) -> Sample:
        """Returns the next sample; adds the spans it is made of to `pieces`."""
        tokens = np.empty(sequence_length + 1, dtype=np.int32)
        lengths: list[int] = []
        filled, goes_on = 0, False
        while filled < sequence_length:
            run = self._run or self._open_run(sequence_length)
            begin = self._at
            stop = min(len(run.tokens), begin + sequence_length - filled)
            tokens[filled : filled + stop - begin] = run.tokens[begin:stop]
            filled += stop - begin
            goes_on = self._take(run, stop, lengths, pieces)
            if goes_on:
                tokens[-1] = run.tokens[stop]
            if stop == len(run.tokens):
                self._row.advance(len(run.ends))
                self._run = None
        if not goes_on:
            tokens[-1] = 0  # nothing follows; its place holds no target
        return Sample(tokens, lengths, self._domain_index, goes_on)

    def cursor(self) -> Cursor:
        if self._run is None:
            return [self._row.block, self._row.place, self._given]
        begin = self._run.ends[self._document - 1] if self._document else 0
        return [self._row.block, self._row.place + self._document, self._at - begin]

    def _take(self, run: Run, stop: int, lengths: list[int], pieces: list[DocumentSpan] | None) -> bool:
        """Adds the pieces up to `stop`; returns whether the last of them ends in the middle of its document."""
        begin, number, ends = self._at, self._document, run.ends
        while begin < stop:
            end = min(ends[number], stop)
            lengths.append(end - begin)
            if pieces is not None:
                first = ends[number - 1] if number else 0
                pieces.append(self._row.piece(number, begin - first, end - first))
            if end == ends[number]:
                number += 1
            begin = end
        self._at, self._document = stop, number
        return number < len(ends) and stop > (ends[number - 1] if number else 0)

    def _open_run(self, wanted_tokens: int) -> Run:
        run = self._run = self._row.run(wanted_tokens)
        self._at, self._document, given, self._given = self._given, 0, self._given, 0
        if given >= run.ends[0]:
            self._run, self._given = None, given
            raise DataError(
                f"data state: {given} tokens given of document {self._row.document_index}",
                f"that document has {run.ends[0]}",
                "The text or the tokenizer changed under an old fingerprint: restore them.",
            )
        return run


class BestFitPacker:
    """Makes samples of the documents of one lane: in groups, whole where a document fits into a sample."""

    def __init__(self, row: LaneDocuments, domain_index: int, cursor: Cursor) -> None:
        self._row, self._domain_index = row, domain_index
        self._begin, self._history = cursor[:2], list(zip(cursor[2::2], cursor[3::2], strict=True))
        self._loose: list[tuple[DocumentSpan, TokenArray]] = []
        """Pieces of the group that are in no bin."""
        self._bins: list[list[tuple[DocumentSpan, TokenArray]]] | None = None

    def next_sample(self, sequence_length: int, pieces: list[DocumentSpan] | None = None) -> Sample:
        """Returns the next sample; adds the spans it is made of to `pieces`."""
        self._replay()
        if self._history and self._history[-1][0] != sequence_length:  # a stage with another length has begun
            self._take_apart()
            self._bins = None
        if not self._bins:
            if not self._loose:
                self._begin, self._history = [self._row.block, self._row.place], []
            self._history.append((sequence_length, 0))
            self._bins = self._make_bins(sequence_length)
        content = self._bins.pop(0)
        length, given = self._history[-1]
        self._history[-1] = (length, given + 1)
        if pieces is not None:
            pieces.extend(piece for piece, _ in content)
        return self._as_sample(content, sequence_length)

    def cursor(self) -> Cursor:
        if self._bins is not None and not self._bins:  # the group is used up: the next begins where the row stands
            return [self._row.block, self._row.place]
        return [*self._begin, *(number for pair in self._history for number in pair)]

    def _replay(self) -> None:
        """After a resume, packs the present group again and leaves out the samples that were given."""
        if self._bins is not None:
            return
        for number, (length, given) in enumerate(self._history):
            if number:
                self._take_apart()
            self._bins = self._make_bins(length)[given:]
        self._bins = self._bins or []

    def _take_apart(self) -> None:
        self._loose = [entry for content in self._bins or [] for entry in content]

    def _make_bins(self, sequence_length: int) -> list[list[tuple[DocumentSpan, TokenArray]]]:
        """Adds documents to the loose pieces up to a full group, cuts what is too long, and packs it."""
        entries, total = self._loose, sum(piece.end - piece.start for piece, _ in self._loose)
        self._loose = []
        while total < SAMPLES_PER_GROUP * sequence_length:
            tokens = self._row.tokens()
            entries.append((DocumentSpan(self._row.epoch, self._row.document_index, 0, len(tokens)), tokens))
            total += len(tokens)
            self._row.advance()
        cut = [
            (piece._replace(start=start, end=min(start + sequence_length, piece.end)), tokens)
            for piece, tokens in entries
            for start in range(piece.start, piece.end, sequence_length)
        ]
        bins = best_fit([piece.end - piece.start for piece, _ in cut], sequence_length)
        return [[cut[number] for number in content] for content in bins]

    def _as_sample(self, content: list[tuple[DocumentSpan, TokenArray]], sequence_length: int) -> Sample:
        tokens = np.zeros(sequence_length + 1, dtype=np.int32)
        at, lengths = 0, []
        for piece, document in content:
            lengths.append(piece.end - piece.start)
            tokens[at : at + lengths[-1]] = document[piece.start : piece.end]
            at += lengths[-1]
        last, document = content[-1]
        goes_on = last.end < len(document) and at == sequence_length
        padding = sequence_length - at
        if goes_on:
            tokens[-1] = document[last.end]
        if padding:
            tokens[at:-1] = document[-1]  # <|endoftext|>, which ends every document
            lengths.append(padding)
        return Sample(tokens, lengths, self._domain_index, goes_on, padding)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts pieces of the given lengths (none above `capacity`) into bins: the longest first, each where it leaves the
    least room. Returns the numbers of the pieces of each bin, bins and pieces in the order in which pieces were given:
    in the order of packing, long documents would come first and all lanes would begin with them.

    An integer holds one bit for each amount of room, so that two integer operations find the bin with the least
    sufficient room.
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
