"""The order of the documents of a domain: a seeded permutation that is computed, never stored.

A keyed Feistel network maps position -> document one to one, so any position of any epoch is found in constant time
and memory, and a resume needs no shuffle buffer. Only integers and BLAKE2b are used: the same numbers come out on
every machine and every Python version, which `hash()` and `random` do not promise.

Doubt, said openly: this shuffles over the whole domain, so neighbours in the order lie in different shards and every
read is a random one. On local disks the page cache carries that; on network storage a shuffle within windows of a few
shards will read faster. It can replace `permuted_index` without touching anything else.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

NUM_ROUNDS = 8
"""Each round moves one half. Four are enough in theory for a random-looking permutation of many documents; eight leave
no pattern for small counts either and take 8 µs a document, where tokenizing it takes hundreds."""

_MASK_64 = (1 << 64) - 1


def permuted_index(position: int, count: int, seed: int, epoch: int, domain: str) -> int:
    """Which of `count` documents stands at `position` (0 to count - 1) in this epoch of this domain.

    The network works on pairs (left, right) in Z_a x Z_b with a * b just above `count`; adding a keyed function of
    one half to the other is a bijection of the pairs. Pairs that are no document are walked on ("cycle walking")
    until a document comes, which keeps it a bijection of the documents; fewer than `a` pairs of a * b are such gaps.
    """
    assert 0 <= position < count, (position, count)
    left_size = math.isqrt(count - 1) + 1 if count > 1 else 1
    right_size = -(-count // left_size)
    round_keys = _round_keys(seed, epoch, domain)
    index = position
    while True:
        left, right = divmod(index, right_size)
        for number, key in enumerate(round_keys):
            if number % 2 == 0:
                left = (left + _mix(right, key)) % left_size
            else:
                right = (right + _mix(left, key)) % right_size
        index = left * right_size + right
        if index < count:
            return index


@dataclass(frozen=True)
class EpochPosition:
    """A global position of a domain's endless sequence, taken apart."""

    epoch: int
    """How often the domain was read to its end before."""
    document_index: int
    """Number of the document within the domain."""


def document_at(global_position: int, count: int, seed: int, domain: str) -> EpochPosition:
    """The document at `global_position` >= 0 of the endless sequence epoch 0, epoch 1, ... of a domain."""
    epoch, position = divmod(global_position, count)
    return EpochPosition(epoch, permuted_index(position, count, seed, epoch, domain))


def lane_position(lane: int, num_lanes: int, documents_drawn: int) -> int:
    """Global position of the next document of a lane: lane, lane + num_lanes, lane + 2 * num_lanes, ...

    The lanes deal the endless sequence out like cards, so each document comes once an epoch whatever the number of
    lanes, also when a domain has fewer documents than there are lanes. Lanes do not wait for each other: one may be
    in the next epoch of a domain while another still reads the last documents of this one.
    """
    return lane + documents_drawn * num_lanes


@lru_cache(maxsize=4096)
def _round_keys(seed: int, epoch: int, domain: str) -> tuple[int, ...]:
    """64-bit keys of the rounds. The text form has no two readings: seed and epoch are plain integers."""
    digest = hashlib.blake2b(
        f"{seed}|{epoch}|{domain}".encode(), digest_size=8 * NUM_ROUNDS, person=b"z2all-order-v1"
    ).digest()
    return tuple(int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(NUM_ROUNDS))


def _mix(value: int, key: int) -> int:
    """The finaliser of SplitMix64: every input bit flips half of the output bits."""
    mixed = (value + key) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)
