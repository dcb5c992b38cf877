"""Reads a SentencePiece .model file.

The file is one protobuf message. Only the fields below matter, so a small reader of the wire format is enough, and
neither SentencePiece nor protobuf needs to be installed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from z2all_ds.base.errors import DataError

SPACE_MARK = "\u2581"
LONGEST_PIECE_BYTES = 512
"""SentencePiece writes up to 16 characters by default. The time for the merges grows with the square of the length."""


class PieceKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


MODEL_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


@dataclass(frozen=True)
class SpmPiece:
    """One entry of the vocabulary; its index in the list is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SpmModel:
    """The content of a .model file. Missing flags have SentencePiece's defaults."""

    pieces: tuple[SpmPiece, ...]
    kind: str
    charsmap: bytes
    """Compiled normalization rules such as NFKC; may be empty."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    space_after_word: bool
    """Spaces end a piece instead of beginning one."""

    @property
    def has_all_bytes(self) -> bool:
        return sum(piece.kind is PieceKind.BYTE for piece in self.pieces) == 256


def parse_spm_model(data: bytes, where: str) -> SpmModel:
    """Parse the bytes of a .model file; `where` names it in errors."""
    pieces: list[SpmPiece] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                if len(value) > LONGEST_PIECE_BYTES:
                    raise ValueError(f"piece {len(pieces)} has {len(value):,} of at most {LONGEST_PIECE_BYTES} bytes")
                score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
                pieces.append(SpmPiece(piece.get(1, b"").decode("utf-8"), score, PieceKind(piece.get(3, 1))))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                rules = dict(_fields(value))
        if not pieces:
            raise ValueError("it has no pieces")
        return SpmModel(
            pieces=tuple(pieces),
            kind=MODEL_KINDS[trainer.get(3, 1)],
            charsmap=rules.get(2, b""),
            add_dummy_prefix=bool(rules.get(3, 1)),
            remove_extra_whitespaces=bool(rules.get(4, 1)),
            space_after_word=bool(trainer.get(24, 0)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        rule = f"not a SentencePiece model ({error or type(error).__name__})"
        raise DataError(where, rule, "Give a file that SentencePiece wrote, or a tokenizer.json.") from None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a message: integers as int, all others as bytes."""
    position = 0
    while position < len(data):
        key, position = _integer(data, position)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _integer(data, position)
            yield field, value
            continue
        if wire == 2:
            length, position = _integer(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + length > len(data):
            raise ValueError("unexpected end")
        yield field, data[position : position + length]
        position += length


def _integer(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError(f"endless number at byte {position}")
