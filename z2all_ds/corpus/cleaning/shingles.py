"""Shingles: hashes of five consecutive tokens. Two documents are compared by their sets of shingles.

A token is one CJK character, or a run of other letters and digits; case, whitespace and punctuation do not count. So
Chinese is compared by five characters and English by five words, without a decision on the language of a text: near the
limit of such a decision, a copy might share nothing with its original.

All operations are on arrays of code points, without a Python object per token.
"""

import zlib
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

TOKENS_PER_SHINGLE = 5
MAX_SHINGLES = 16_384
"""A longer document keeps its smallest hashes, which are the same in a copy; a sample by position is not."""

_SEPARATOR, _LETTER, _CJK = 0, 1, 2
_CJK_RANGES = (
    *((0x3005, 0x3007), (0x3041, 0x30FA), (0x30FC, 0x312F), (0x31A0, 0x31BF), (0x31F0, 0x31FF), (0x3400, 0x4DBF)),
    *((0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)
_SIGN_RANGES = (
    *((0x80, 0xA9), (0xAB, 0xB4), (0xB6, 0xB9), (0xBB, 0xBF), (0xD7, 0xD7), (0xF7, 0xF7), (0x2000, 0x206F)),
    *((0x20A0, 0x20CF), (0x2190, 0x2BFF), (0x3000, 0x3004), (0x3008, 0x3020), (0x3030, 0x3030), (0x30FB, 0x30FB)),
    *((0xE000, 0xF8FF), (0xFE10, 0xFE6F), (0xFF00, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF65)),
    *((0xFFE0, 0xFFFF), (0x1F000, 0x1FAFF), (0xE0000, 0x10FFFF)),
)
_BASE = 0x9E3779B1
"""Base of the polynomial over the characters of a token. Odd, so that it has an inverse modulo 2^32."""
_SHORT_TEXT = 1 << 16

Hashes = npt.NDArray[np.uint32]


def shingle_hashes(text: str) -> Hashes:
    """Return the hashes of all shingles, in any order and possibly repeated.

    A text with too few tokens has one shingle of all tokens; a text of only punctuation has one of its characters; a
    text of only whitespace has none.
    """
    tokens = _token_hashes(text)
    if not len(tokens):
        signs = "".join(text.split())
        if not signs:
            return tokens
        tokens = np.array([zlib.crc32(signs.encode("utf-8", "surrogatepass"))], dtype=np.uint32)
    if len(tokens) < TOKENS_PER_SHINGLE:
        tokens = np.concatenate([tokens, np.zeros(TOKENS_PER_SHINGLE - len(tokens), dtype=np.uint32)])
    num_shingles = len(tokens) - TOKENS_PER_SHINGLE + 1
    hashes = tokens[:num_shingles].copy()
    for shift in range(1, TOKENS_PER_SHINGLE):
        hashes *= np.uint32(_BASE)
        hashes += tokens[shift : shift + num_shingles]
    hashes = _mix(hashes)
    return hashes if num_shingles <= MAX_SHINGLES else np.unique(hashes)[:MAX_SHINGLES]


def _token_hashes(text: str) -> Hashes:
    """Return one hash per token, in order: a polynomial over the characters of the token, modulo 2^32.

    All sums come from one running sum over the text, to which separators add nothing. The difference between two token
    starts, divided by the power of the first, does not depend on the position of the token.
    """
    class_of, hash_of = _tables()
    if text.isascii():
        codes: npt.NDArray[np.generic] = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    at = codes.astype(np.intp)  # converted once for both lookups
    classes = class_of.take(at, mode="clip")
    # A token starts at every CJK character, and at a letter that does not follow a letter.
    letter = classes == _LETTER
    starts_here = classes == _CJK
    starts_here[:1] |= letter[:1]
    starts_here[1:] |= letter[1:] & ~letter[:-1]
    starts = np.flatnonzero(starts_here)
    powers, inverse_powers = _powers(max(_SHORT_TEXT, 1 << len(codes).bit_length()))
    sums = np.empty(len(codes) + 1, dtype=np.uint32)
    sums[0] = 0
    np.cumsum(hash_of.take(at, mode="clip") * powers[: len(codes)], dtype=np.uint32, out=sums[1:])
    ends = np.append(starts[1:], len(codes))
    return _mix((sums[ends] - sums[starts]) * inverse_powers[starts])[: len(starts)]


def _mix(values: Hashes) -> Hashes:
    """Mix the bits (the finalizer of MurmurHash3)."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))


@lru_cache(maxsize=2)  # for short texts, and for the longest text so far
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Return _BASE^0, _BASE^1 ... and their inverses."""
    found = []
    for base in (_BASE, pow(_BASE, -1, 1 << 32)):
        powers = np.full(count, base, dtype=np.uint32)
        powers[0] = 1
        found.append(np.cumprod(powers, dtype=np.uint32))
    return found[0], found[1]


@cache
def _tables() -> tuple[npt.NDArray[np.uint8], Hashes]:
    """Return class and hash of every code point: six megabytes, made once per process. Uppercase letters have the hash
    of their lowercase, separators 0. Classes are fixed ranges, as Python's Unicode tables differ between versions."""
    classes = np.full(0x110000, _LETTER, dtype=np.uint8)
    classes[:128] = [_LETTER if chr(code).isalnum() or chr(code) == "_" else _SEPARATOR for code in range(128)]
    for first, last in _SIGN_RANGES:
        classes[first : last + 1] = _SEPARATOR
    for first, last in _CJK_RANGES:
        classes[first : last + 1] = _CJK
    folded = np.arange(0x110000, dtype=np.uint32)
    for code in range(_LAST_WITH_CASE + 1):
        small = chr(code).lower()
        folded[code] = ord(small) if len(small) == 1 else code
    hashes = _mix(folded + np.uint32(1))
    hashes[classes == _SEPARATOR] = 0
    return classes, hashes


_LAST_WITH_CASE = 0x52F
"""The end of Latin, Greek and Cyrillic; case is ignored only for these."""
