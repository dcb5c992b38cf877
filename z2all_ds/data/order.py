"""The order of the documents of a domain: shuffled blocks of neighbours, shuffled again inside; computed, not stored.

A domain is cut into *blocks* of some hundred neighbouring documents. The blocks of an epoch are dealt out to the lanes
in an order given by a keyed Feistel network: a one-to-one map from place to block that costs constant time and memory
at any place of any epoch, whether the corpus has ten documents or 10^9. The documents of one block are shuffled by
sorting keyed hashes. So a lane reads in one place of the disk (or fetches one range from a store, or one row group)
for a while, and a batch still mixes as many places of the corpus as there are lanes.

Only integers and BLAKE2b are used: the same numbers come out on every machine and every version of Python and numpy,
which `hash()`, `random` and numpy's generators do not promise.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 8
"""Each round moves one half. Four are enough in theory for a random-looking permutation of many; eight leave no
pattern for small counts either and take 11 µs, once a block."""

BLOCK_BYTES = 1 << 20
"""Raw text of a block at most: what a lane may hold of a remote shard, and a good size for one request."""
BLOCKS_PER_LANE_AND_EPOCH = 8
"""At least so many, or the last block would leave the lanes far apart at the end of an epoch. A small domain is
therefore cut into smaller blocks, down to single documents."""

FEW = 16
"""Up to so many documents, plain integers are quicker than arrays; both give the same order."""

_MASK_64 = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: hashes of neighbours begin far apart


@dataclass(frozen=True)
class BlockPlace:
    """One block of the endless sequence of a domain: its blocks in epoch 0, in epoch 1, ..."""

    epoch: int
    """How often the domain was dealt out to its end before."""
    first: int
    """Its first document."""
    end: int
    """After its last document."""


@dataclass(frozen=True)
class DomainOrder:
    """Which documents come when: a pure function of these values and a place."""

    domain: str
    num_documents: int
    documents_per_block: int
    seed: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_documents // self.documents_per_block)

    def block_at(self, number: int) -> BlockPlace:
        """The block at place `number` >= 0 of the endless sequence."""
        epoch, place = divmod(number, self.num_blocks)
        first = permuted_index(place, self.num_blocks, self.seed, epoch, self.domain) * self.documents_per_block
        return BlockPlace(epoch, first, min(first + self.documents_per_block, self.num_documents))

    def within(self, block: BlockPlace) -> list[int]:
        """The numbers 0, 1, ... of the block's documents, in the order in which they are read."""
        count = block.end - block.first
        if count == 1:
            return [0]
        key = keys(f"{self.seed}|{block.epoch}|{self.domain}|{block.first}", 1)[0]
        if count <= FEW:
            hashes = [_mix((number * _STRIDE) & _MASK_64, key) for number in range(count)]
            return sorted(range(count), key=hashes.__getitem__)
        mixed = _mix_array(np.arange(count, dtype=np.uint64) * np.uint64(_STRIDE) + np.uint64(key))
        order: list[int] = np.argsort(mixed, kind="stable").tolist()
        return order


def documents_per_block(num_documents: int, num_bytes: int, num_lanes: int) -> int:
    """As many as make a good block for this domain and this number of lanes."""
    by_bytes = BLOCK_BYTES * num_documents // max(num_bytes, 1)
    by_lanes = num_documents // (BLOCKS_PER_LANE_AND_EPOCH * num_lanes)
    return max(1, min(by_bytes, by_lanes))


def permuted_index(position: int, count: int, seed: int, epoch: int, domain: str) -> int:
    """Which of `count` things stands at `position` (0 to count - 1) in this epoch of this domain.

    The network works on pairs (left, right) in Z_a x Z_b with a * b just above `count`; adding a keyed function of
    one half to the other is a bijection of the pairs. Pairs that stand for nothing are walked on ("cycle walking")
    until one does, which keeps it a bijection; fewer than `a` pairs of a * b are such gaps.
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
    """64-bit keys. No two settings share a text: seed, epoch and block are plain integers, and names are told apart
    by what stands before them."""
    digest = hashlib.blake2b(text.encode(), digest_size=8 * count, person=b"z2all-order-v2").digest()
    return tuple(int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(count))


def _mix(value: int, key: int) -> int:
    """The finaliser of SplitMix64: every input bit flips half of the output bits."""
    mixed = (value + key) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)


def _mix_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The same for many at once; uint64 arithmetic wraps around as the mask does."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
