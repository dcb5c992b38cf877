"""The order of the documents of a domain: shuffled blocks of adjacent documents, shuffled again inside each block.

A domain is divided into *blocks* of some hundred adjacent documents. The blocks of an epoch are assigned to the lanes
in an order given by a keyed Feistel network: a bijection from position to block that takes constant time and memory at
any position of any epoch, for ten documents or 10^9. The documents of one block are shuffled by sorting keyed hashes.
So a lane reads one region of the disk (or one range of an object, or one row group) for a while, and a batch still
mixes as many regions of the corpus as there are lanes.

Lanes consume equally many tokens, so each epoch is divided into parts of equal size, one per lane: by tokens and the
padding of samples (`TokenOrder`), or by bytes where counting the tokens would take too long (`EvenOrder`). Where not
even those are known, and in runs of earlier versions, a lane reads every L-th block instead (`DomainOrder`); blocks
differ in size, so such lanes drift apart, by 20 % of an epoch in a domain of 80 MB.

Only integers and BLAKE2b are used, so the order is the same on every machine and with every version of Python and
numpy, which `hash()`, `random` and numpy's generators do not guarantee.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 8
"""Each round changes one half. In theory four are enough for large counts; eight leave no pattern in small counts
either and take 11 µs per block."""

BLOCK_BYTES = 1 << 20
"""Maximum raw text per block: what a lane holds of a remote shard, and a good size for one request."""
BLOCKS_PER_LANE_AND_EPOCH = 8
"""Minimum; with fewer, a batch would mix few regions. A small domain is therefore divided into smaller blocks, down to
single documents."""

SMALLEST_DIVIDED_BYTES = 1 << 16
"""Where sizes are in bytes, smaller documents are not divided: half of one is no more than 2 % of the smallest part."""
BYTES_PER_SPLIT_TOKEN = 16
"""A document of so many bytes per token of `split_unit` almost always has more tokens than that."""

_MASK_64 = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: hashes of neighbours begin far apart


class EpochPadding(Protocol):
    """Computes the padding of samples from the sizes of documents."""

    def of_parts(self, epoch: int, tokens_before: int, parts: list[npt.NDArray[np.int64]]) -> list[int]:
        """Return the padding in the part of each lane, from the sizes of its documents."""
        ...


@dataclass(frozen=True)
class BlockRange:
    """Documents `first` to `end` - 1 of a domain, as one block of an epoch (from 0)."""

    epoch: int
    first: int
    end: int


class Used(NamedTuple):
    """Tokens that a lane has used since the document of its cursor."""

    in_document: int
    """Tokens of that document, including those before the lane's part."""
    in_group: int
    """Tokens of the group of documents that begins with it, without those before the lane's part."""


Cut = tuple[int, int, int]
"""A place in an epoch: position of the block, document in the order of the block, size of that document before it."""


class LaneBlock(NamedTuple):
    """The block in which a lane reads."""

    block: int
    """Its number in the cursor of the lane."""
    position: int
    """Index in `documents` of the next one to read."""
    range: BlockRange
    documents: list[int]
    """Numbers (from 0 in the block) of the documents that the lane reads in it, in order, from the block's first on."""
    begin: int = 0
    """Size of what the lane before reads of document `position`, if it is the first of the lane's part."""
    end: int = 0
    """Size of the last document up to the end of the lane's part; 0: all."""
    begins_part: bool = False
    """`position` is the beginning of the lane's part of an epoch."""


@dataclass(frozen=True)
class DomainOrder:
    """The order of the documents of a domain, a pure function of these values. Lane l of L reads every L-th block."""

    kind: ClassVar[str] = "strided"
    domain: str
    num_documents: int
    documents_per_block: int
    seed: int
    num_lanes: int

    def prepare(self) -> None:
        """Do what the first use would do, such as counting tokens."""

    @property
    def num_blocks(self) -> int:
        return -(-self.num_documents // self.documents_per_block)

    def lane_block(self, lane: int, block: int, position: int) -> LaneBlock:
        """Return the block in which a lane reads whose cursor is at `position` of `block`; 0 of 0 is the beginning."""
        found = self.block_at(lane + block * self.num_lanes)
        return LaneBlock(block, position, found, self.within(found))

    def epochs_read(self, lane: int, block: int, position: int, used: Used) -> float:
        """Return how often a lane has read its share of the domain: up to a document in a block, and these tokens."""
        return block * self.num_lanes / self.num_blocks

    def left_in_part(self, lane: int, block: int, position: int) -> int:
        """Return the size of the lane's part of the epoch from this document on; 0 if unknown."""
        return 0

    def part(self, document: int, begin: int, end: int, num_tokens: int) -> tuple[int, int]:
        """Return the tokens [first, end) that a lane reads of a document, from `begin` and `end` of its LaneBlock."""
        return 0, num_tokens

    def block_at(self, number: int) -> BlockRange:
        """Return block `number` >= 0 of the endless sequence: all blocks in epoch 0, all blocks in epoch 1, ..."""
        epoch, position = divmod(number, self.num_blocks)
        first = permuted_index(position, self.num_blocks, self.seed, epoch, self.domain) * self.documents_per_block
        return BlockRange(epoch, first, min(first + self.documents_per_block, self.num_documents))

    def within(self, block: BlockRange) -> list[int]:
        """Return the numbers (from 0) of the block's documents in reading order."""
        count = block.end - block.first
        if count == 1:
            return [0]
        key = keys(f"{self.seed}|{block.epoch}|{self.domain}|{block.first}", 1)[0]
        hashes = _mix(np.arange(count, dtype=np.uint64) * np.uint64(_STRIDE), key)
        order: list[int] = np.argsort(hashes, kind="stable").tolist()
        return order


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
        epoch, row = divmod(block, self.num_blocks)
        self.cuts(epoch)
        found = self.block_at(block)
        sizes = self._sizes[found.first : found.end][self.within(found)]
        at = int(self._row_ends[epoch][row]) - int(sizes[position:].sum())
        (begin_before, end_before), (begin, end) = (given[lane : lane + 2] for given in self._given[epoch : epoch + 2])
        before = end_before - begin_before
        return before, at - (begin - begin_before), end - begin - before

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
            block = self.block_at(first_block + row)
            sizes = self._sizes[block.first : block.end][self.within(block)]
            borders = np.concatenate([[0], np.cumsum(sizes)]) + (int(ends[row]) - int(sizes.sum()))
            document = min(int(np.searchsorted(borders, wanted, side="right")), len(sizes)) - 1
            size, offset = int(sizes[document]), wanted - int(borders[document])
            below, above = self._places_in(size, offset)
            taken = below if offset - below <= above - offset else above
            if taken < size:
                cut = (row, document, taken)
            else:
                cut = (row, document + 1, 0) if document + 1 < len(sizes) else (row + 1, 0, 0)
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


def documents_per_block(num_documents: int, num_bytes: int, num_lanes: int) -> int:
    """Return the block size for this domain and number of lanes."""
    by_bytes = BLOCK_BYTES * num_documents // max(num_bytes, 1)
    by_lanes = num_documents // (BLOCKS_PER_LANE_AND_EPOCH * num_lanes)
    return max(1, min(by_bytes, by_lanes))


def permuted_index(position: int, count: int, seed: int, epoch: int, domain: str) -> int:
    """Return which of `count` items is at `position` (0 to count - 1) in this epoch of this domain.

    The network works on pairs (left, right) in Z_a x Z_b with a * b slightly above `count`; adding a keyed function of
    one half to the other is a bijection of the pairs. A pair beyond `count` (fewer than `a` of them) is mapped again
    until it is in range ("cycle walking"), which keeps the map a bijection.
    """
    assert 0 <= position < count, (position, count)
    left_size = math.isqrt(count - 1) + 1 if count > 1 else 1
    right_size = -(-count // left_size)
    round_keys = keys(f"{seed}|{epoch}|{domain}", NUM_ROUNDS)
    index = position
    while True:
        left, right = divmod(index, right_size)
        for key_left, key_right in zip(round_keys[::2], round_keys[1::2], strict=True):
            left = (left + _mix(right, key_left)) % left_size
            right = (right + _mix(left, key_right)) % right_size
        index = left * right_size + right
        if index < count:
            return index


@lru_cache(maxsize=4096)
def keys(text: str, count: int) -> tuple[int, ...]:
    """Return `count` 64-bit keys. Every use passes a different `text`."""
    digest = hashlib.blake2b(text.encode(), digest_size=8 * count, person=b"z2all-order-v2").digest()
    return tuple(int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(count))


def _mix(value: Any, key: int) -> Any:
    """Hash an int or a uint64 array with the finalizer of SplitMix64."""
    mixed = (value + key) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)
