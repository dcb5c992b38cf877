"""Orders in which lane l of L reads the l-th of L equal parts of every epoch.

Lanes consume equally many tokens, so after N epochs' worth of tokens every document has been read N times. Parts are
equal in tokens and in the padding of samples (`TokenOrder`), or in bytes where counting the tokens would take too long
(`EvenOrder`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from z2all_ds.data.order import DomainOrder, LaneBlock, Used

SMALLEST_DIVIDED_BYTES = 1 << 16
"""Where sizes are in bytes, smaller documents are not divided: half of one is no more than 2 % of the smallest part."""
BYTES_PER_SPLIT_TOKEN = 16
"""A document of so many bytes per token of `split_unit` almost always has more tokens than that."""

Cut = tuple[int, int, int]
"""A place in an epoch: position of the block, document in the order of the block, size of that document before it."""


class EpochPadding(Protocol):
    """Computes the padding of samples from the sizes of documents."""

    def of_parts(self, epoch: int, tokens_before: int, parts: list[npt.NDArray[np.int64]]) -> list[int]:
        """Return the padding in the part of each lane, from the sizes of its documents."""
        ...


@dataclass(frozen=True)
class EvenOrder(DomainOrder):
    """The same order of blocks, in which lane l of L reads the l-th of L parts of equal size in every epoch.

    A part begins and ends between two documents, or within a large one. What it has too much or too little is carried
    to the next epoch, so the sum over any number of epochs differs from the equal share by at most half a document that
    is not divided. The number of a block in a cursor is that of `block_at`; a cursor before the part of its lane means
    the beginning of the part.

    The size of a document is in bytes here, and a place in it becomes one in its tokens when they are read. So the two
    lanes that share a document need not know what the other reads of it.
    """

    kind: ClassVar[str] = "even"
    counts_tokens: ClassVar[bool] = False
    """Whether sizes are in tokens."""
    document_sizes: Callable[[], npt.NDArray[np.integer[Any]]]
    """Returns the size of each document. Called at the first use, as it may read the whole domain."""
    split_unit: int = sys.maxsize
    """Parts may begin and end within a document after a multiple of this many tokens."""

    def part(self, document: int, begin: int, end: int, num_tokens: int) -> tuple[int, int]:
        first, last = (self._tokens_before(document, offset, num_tokens) for offset in (begin, end))
        return first, last or num_tokens

    def _tokens_before(self, document: int, offset: int, num_tokens: int) -> int:
        """Return the place in the tokens of a document that is at `offset` bytes. A document that has fewer tokens than
        its bytes promise (other fields can be large) is not divided: both lanes read it."""
        unit_bytes = self.split_unit * int(self._sizes[document])
        units = (2 * offset * num_tokens + unit_bytes) // (2 * unit_bytes)  # the nearest, in whole numbers
        most = (num_tokens - 1) // self.split_unit
        return min(max(units, 1), most) * self.split_unit if offset else 0

    def _places_in(self, size: int, offset: int) -> tuple[int, int]:
        """Return the nearest places before and after `offset` at which a document of this size may be divided."""
        is_large = size >= max(SMALLEST_DIVIDED_BYTES, BYTES_PER_SPLIT_TOKEN * self.split_unit)
        return (offset, offset) if is_large else (0, size)

    def prepare(self) -> None:
        self.cuts(0)

    def lane_block(self, lane: int, block: int, position: int) -> LaneBlock:
        epoch, row = divmod(block, self.num_blocks)
        while True:
            begin, end = self.cuts(epoch)[lane : lane + 2]
            at = begin if (row, position) <= begin[:2] else (row, position, 0)
            if at < end:
                break
            epoch, row, position = epoch + 1, 0, 0
        found = self.block_at(epoch * self.num_blocks + at[0])
        documents, end_token = self.within(found), 0
        if at[0] == end[0]:
            end_token = end[2]
            documents = documents[: end[1] + bool(end_token)]
        return LaneBlock(epoch * self.num_blocks + at[0], at[1], found, documents, at[2], end_token, at == begin)

    def epochs_read(self, lane: int, block: int, position: int, used: Used) -> float:
        before, in_part, _ = self._progress(lane, block, position)
        if self.counts_tokens:
            in_part = max(0, in_part + used.in_document) + used.in_group
        return (before + max(0, in_part)) * self.num_lanes / int(self._row_ends[0][-1])

    def left_in_part(self, lane: int, block: int, position: int) -> int:
        _, in_part, size = self._progress(lane, block, position)
        return size - max(0, in_part)

    def _progress(self, lane: int, block: int, position: int) -> tuple[int, int, int]:
        """Return the size of the lane's parts of earlier epochs, from the beginning of its part of this one to the
        beginning of a document (negative if it begins earlier), and of this part."""
        epoch = block // self.num_blocks
        self.cuts(epoch)
        known = self._last_borders.get(lane)
        if known is None or known[0] != block:
            known = self._last_borders[lane] = block, self._borders(block)
        at = int(known[1][position])
        (begin_before, end_before), (begin, end) = (given[lane : lane + 2] for given in self._given[epoch : epoch + 2])
        before = end_before - begin_before
        return before, at - (begin - begin_before), end - begin - before

    def _borders(self, block: int) -> npt.NDArray[np.int64]:
        """Return the size from the beginning of the epoch to each document of a block, and to the end of the block."""
        epoch, row = divmod(block, self.num_blocks)
        found = self.block_at(block)
        sizes = self._sizes[found.first : found.end][self.within(found)]
        borders: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)])
        return borders + (self._row_ends[epoch][row] - borders[-1])

    def cuts(self, epoch: int) -> list[Cut]:
        """Return where the part of each lane begins, then the end."""
        while len(self._cuts) <= epoch:
            self._cuts.append(self._next_cuts())
        return self._cuts[epoch]

    def _next_cuts(self) -> list[Cut]:
        epoch, first_block = len(self._cuts), len(self._cuts) * self.num_blocks
        starts = np.array([self.block_at(first_block + row).first for row in range(self.num_blocks)])
        ends = np.cumsum(self._block_sizes[starts // self.documents_per_block])
        self._row_ends.append(ends)
        cuts, size_before, given = [(0, 0, 0)], 0, [0]
        padding = self._padding_before(epoch)
        total = int(ends[-1]) * (epoch + 1) + padding[-1]
        for lane in range(1, self.num_lanes):
            wanted = lane * total // self.num_lanes - self._given[epoch][lane] - padding[lane]
            wanted = min(max(wanted, 0), int(ends[-1]))
            row = min(int(np.searchsorted(ends, wanted, side="right")), self.num_blocks - 1)
            borders = self._borders(first_block + row)
            num_documents = len(borders) - 1
            document = min(int(np.searchsorted(borders, wanted, side="right")), num_documents) - 1
            size, offset = int(borders[document + 1] - borders[document]), wanted - int(borders[document])
            below, above = self._places_in(size, offset)
            taken = below if offset - below <= above - offset else above
            if taken < size:
                cut = (row, document, taken)
            else:
                cut = (row, document + 1, 0) if document + 1 < num_documents else (row + 1, 0, 0)
            if cut > cuts[-1]:  # not so if a document that cannot be split is larger than the part of a lane
                size_before = int(borders[document]) + taken
            cuts.append(max(cut, cuts[-1]))
            given.append(self._given[epoch][lane] + size_before)
        self._given.append([*given, int(ends[-1]) * (epoch + 1)])
        return [*cuts, (self.num_blocks, 0, 0)]

    def _padding_before(self, epoch: int) -> Sequence[int]:
        """Return the padding of the lanes before each lane, and of all, in all epochs before this one."""
        return [0] * (self.num_lanes + 1)

    @cached_property
    def _cuts(self) -> list[list[Cut]]:
        """Those of the epochs reached so far; each depends on the one before."""
        return []

    @cached_property
    def _last_borders(self) -> dict[int, tuple[int, npt.NDArray[np.int64]]]:
        """The last block that each lane asked about, and its borders, which take 0.1 to 0.4 ms."""
        return {}

    @cached_property
    def _row_ends(self) -> list[npt.NDArray[np.int64]]:
        """Size up to the end of each block, in the order of each epoch reached so far."""
        return []

    @cached_property
    def _given(self) -> list[list[int]]:
        """Size of the parts before each lane, and of all parts, in all epochs before each one reached so far."""
        return [[0] * (self.num_lanes + 1)]

    @cached_property
    def _sizes(self) -> npt.NDArray[np.int64]:
        sizes: npt.NDArray[np.int64] = np.maximum(self.document_sizes().astype(np.int64), 1)
        assert len(sizes) == self.num_documents, (self.domain, len(sizes), self.num_documents)
        return sizes

    @cached_property
    def _block_sizes(self) -> npt.NDArray[np.int64]:
        return np.add.reduceat(self._sizes, np.arange(0, self.num_documents, self.documents_per_block))


@dataclass(frozen=True)
class TokenOrder(EvenOrder):
    """The order with parts of equally many tokens: the size of a document is its number of tokens.

    A lane whose samples had more padding than those of other lanes gets as many tokens less in the next epoch, as it
    reads as many samples as the others.
    """

    kind: ClassVar[str] = "tokens"
    counts_tokens: ClassVar[bool] = True
    padding: EpochPadding | None = None
    """None if there is none, or if computing it would take too long."""

    def part(self, document: int, begin: int, end: int, num_tokens: int) -> tuple[int, int]:
        return begin, end or num_tokens

    def _places_in(self, size: int, offset: int) -> tuple[int, int]:
        below = offset // self.split_unit * self.split_unit
        return below, min(below + self.split_unit, size)

    def _padding_before(self, epoch: int) -> Sequence[int]:
        while self.padding and len(self._padding) <= epoch:
            last = len(self._padding) - 1
            of_parts = self.padding.of_parts(last, last * self.tokens_per_epoch, self._parts(last))
            self._padding.append(
                [before + now for before, now in zip(self._padding[last], accumulate(of_parts, initial=0), strict=True)]
            )
        return self._padding[epoch] if self.padding else super()._padding_before(epoch)

    @cached_property
    def tokens_per_epoch(self) -> int:
        return int(self._sizes.sum())

    def _parts(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return the sizes of the documents, or of what is read of them, in the part of each lane."""
        blocks = [self.block_at(epoch * self.num_blocks + row) for row in range(self.num_blocks)]
        sizes = np.concatenate([self._sizes[block.first : block.end][self.within(block)] for block in blocks])
        first_of_row = [0, *accumulate(block.end - block.first for block in blocks)]
        parts = []
        for (row, document, before), (end_row, end_document, end) in pairwise(self.cuts(epoch)):
            part = sizes[first_of_row[row] + document : first_of_row[end_row] + end_document + bool(end)].copy()
            if end:
                part[-1] = end
            if before:
                part[0] -= before
            parts.append(part)
        return parts

    @cached_property
    def _padding(self) -> list[list[int]]:
        """That of the lanes before each lane, and of all, in all epochs before each one computed so far."""
        return [[0] * (self.num_lanes + 1)]
