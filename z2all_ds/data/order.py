"""The order of the documents of a domain: shuffled blocks of adjacent documents, shuffled again inside each block.

A domain is divided into *blocks* of some hundred adjacent documents. The blocks of an epoch are assigned to the lanes
in an order given by a keyed Feistel network: a bijection from position to block that takes constant time and memory at
any position of any epoch, for ten documents or 10^9. The documents of one block are shuffled by sorting keyed hashes.
So a lane reads one region of the disk (or one range of an object, or one row group) for a while, and a batch still
mixes as many regions of the corpus as there are lanes.

Lane l of L reads every L-th block here. Blocks differ in size, so lanes drift apart, by 20 % of an epoch in a domain of
80 MB. `even_order` divides the same order of blocks into equal parts; this one is for domains without known sizes, and
for runs of earlier versions.

Only integers and BLAKE2b are used, so the order is the same on every machine and with every version of Python and
numpy, which `hash()`, `random` and numpy's generators do not guarantee.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

NUM_ROUNDS = 8
"""Each round changes one half. In theory four are enough for large counts; eight leave no pattern in small counts
either and take 11 µs per block."""

BLOCK_BYTES = 1 << 20
"""Maximum raw text per block: what a lane holds of a remote shard, and a good size for one request."""
BLOCKS_PER_LANE_AND_EPOCH = 8
"""Minimum; with fewer, a batch would mix few regions. A small domain is therefore divided into smaller blocks, down to
single documents."""

_MASK_64 = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: hashes of neighbours begin far apart


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
