"""A lane: one endless, deterministic row of samples, with a cursor of a few integers for each domain.

The number of lanes is fixed for the life of a run and has nothing to do with the number of ranks. Lane l of L owns
the blocks l, l + L, l + 2L, ... of every domain's endless sequence (`order`), so the lanes share out each epoch with no
document twice and none left. Lanes do not wait for each other: one may be in the next epoch of a domain while another
still reads the last blocks of this one.

There are two ways from documents to samples. "cut" lays the documents end to end and cuts the row every
`sequence_length` tokens: no token is padded, dropped or repeated. "best_fit" takes documents in groups and packs each
group's documents whole, side by side, the longest first; only those longer than a sample are cut, and what room is
left is padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from z2all_ds.base.errors import DataError
from z2all_ds.data.documents import Block, Domain, Run, TokenArray
from z2all_ds.data.order import BlockPlace, DomainOrder
from z2all_ds.data.packing import Sample, best_fit
from z2all_ds.data.stages import Stage

Cursor = list[int]
"""Where a lane stands in a domain. Its first two numbers are the lane's block (0, 1, 2, ...) and the place in it; then,
for "cut", the tokens already given of that document; for "best_fit", (sequence length, samples given) of the group that
begins there, with a pair more for each change of length within it."""

LaneState = list[Cursor]
"""The cursors of a lane, in the order of the stream's domains."""

PACKING_MODES = ("cut", "best_fit")
SAMPLES_PER_GROUP = 64
"""Of "best_fit". On real text in samples of 2048 tokens 2.7 % are padding with groups of 32, 1.7 % with 64, 1.2 % with
128; a resume reads the group again, and a lane holds one of each domain."""


class DocumentSpan(NamedTuple):
    """Which tokens of which document went into a sample."""

    epoch: int
    document_index: int
    start: int
    end: int


@dataclass(frozen=True)
class Sources:
    """What all lanes of a stream share."""

    domains: Sequence[Domain]
    orders: Sequence[DomainOrder]
    num_lanes: int
    packing: str


class LaneDocuments:
    """The documents of one domain in the order in which one lane reads them."""

    def __init__(self, domain: Domain, order: DomainOrder, lane: int, num_lanes: int, block: int, place: int) -> None:
        self._domain, self._order, self._lane, self._num_lanes = domain, order, lane, num_lanes
        self._opened: Block | None = None
        self.block, self.place = block, place
        self._seek_block(block)
        if not 0 <= place < len(self._within):
            raise DataError(
                f"data state: place {place} in a block of domain {domain.name!r}",
                f"that block has {len(self._within)} documents",
                "The state does not belong to this corpus: restore the one it was made with.",
            )

    @property
    def document_index(self) -> int:
        return self._place_of_block.first + self._within[self.place]

    def tokens(self) -> TokenArray:
        """Of the document the row stands at."""
        return self._open_block().tokens(self._within[self.place])

    def run(self, wanted_tokens: int) -> Run:
        """The document the row stands at, and perhaps some that follow it, all of one block."""
        return self._open_block().run(self._within[self.place :], wanted_tokens)

    def advance(self, documents: int = 1) -> None:
        """Goes on by so many, not beyond the beginning of the next block."""
        self.place += documents
        if self.place == len(self._within):
            self._seek_block(self.block + 1)
            self.place = 0

    def piece(self, ahead: int, start: int, end: int) -> DocumentSpan:
        """Tokens of the document so many places ahead in the block."""
        return DocumentSpan(self.epoch, self._place_of_block.first + self._within[self.place + ahead], start, end)

    def _open_block(self) -> Block:
        if self._opened is None:
            self._opened = self._domain.open_block(self._place_of_block.first, self._place_of_block.end)
        return self._opened

    def _seek_block(self, block: int) -> None:
        self.block, self._opened = block, None
        self._place_of_block: BlockPlace = self._order.block_at(self._lane + block * self._num_lanes)
        self.epoch = self._place_of_block.epoch
        self._within = self._order.within(self._place_of_block)


class Packer(Protocol):
    """Samples of one domain in one lane."""

    def next_sample(self, sequence_length: int, pieces: list[DocumentSpan] | None = None) -> Sample:
        """`pieces` takes what the sample is made of; in training nobody asks."""
        ...

    def cursor(self) -> Cursor: ...


class CutPacker:
    """Documents end to end, cut every `sequence_length` tokens."""

    def __init__(self, open_row: Callable[[int, int], LaneDocuments], domain_index: int, cursor: Cursor) -> None:
        block, place, self._given = cursor
        self._row = open_row(block, place)
        self._domain_index = domain_index
        self._run: Run | None = None
        self._at = 0  # tokens given of the run
        self._document = 0  # number of the present document in the run; the row stands at the run's first

    def next_sample(self, sequence_length: int, pieces: list[DocumentSpan] | None = None) -> Sample:
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
        """Counts the pieces up to `stop`; whether the last of them ends in the middle of its document."""
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
    """Groups of documents, packed whole where they fit into a sample."""

    def __init__(self, open_row: Callable[[int, int], LaneDocuments], domain_index: int, cursor: Cursor) -> None:
        self._begin, history = cursor[:2], cursor[2:]
        self._row = open_row(*self._begin)
        self._domain_index = domain_index
        self._history = [(history[n], history[n + 1]) for n in range(0, len(history), 2)]
        self._loose: list[tuple[DocumentSpan, TokenArray]] = []
        """Pieces in hand that are in no bin yet."""
        self._bins: list[list[tuple[DocumentSpan, TokenArray]]] | None = None

    def next_sample(self, sequence_length: int, pieces: list[DocumentSpan] | None = None) -> Sample:
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
        """After a resume: the group in hand once more, without what was given of it."""
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
        """Fills up what is in hand to a group, cuts what is too long, and packs it."""
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


def fresh_cursor(packing: str) -> Cursor:
    return [0, 0, 0] if packing == "cut" else [0, 0]


class Lane:
    """Gives the samples of one lane from `state` on."""

    def __init__(self, sources: Sources, lane: int, state: LaneState) -> None:
        self._sources, self.number = sources, lane
        self._cursors = [list(cursor) for cursor in state]
        self._packers: dict[int, Packer] = {}

    def next_sample(self, sample: int, stage: Stage, pieces: list[DocumentSpan] | None = None) -> Sample:
        """Global sample `sample`; must be asked for in order. `pieces` takes what it is made of."""
        domain_index = stage.mixture.domain_of(sample)
        packer = self._packers.get(domain_index)
        if packer is None:
            kind = CutPacker if self._sources.packing == "cut" else BestFitPacker
            packer = kind(self._row_opener(domain_index), domain_index, self._cursors[domain_index])
            self._packers[domain_index] = packer
        made = packer.next_sample(stage.sequence_length, pieces)
        self._cursors[domain_index] = packer.cursor()
        return made

    def cursor(self, domain_index: int) -> Cursor:
        return self._cursors[domain_index]

    def _row_opener(self, domain_index: int) -> Callable[[int, int], LaneDocuments]:
        sources = self._sources
        domain, order = sources.domains[domain_index], sources.orders[domain_index]
        return lambda block, place: LaneDocuments(domain, order, self.number, sources.num_lanes, block, place)
