"""Reads a SentencePiece .model file: pieces, kind of model and text rules, without SentencePiece or protobuf installed.

The file is one protobuf message. Only the fields below matter here, so a reader of the wire format is enough.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from z2all_ds.base.errors import DataError


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
    """One entry of the vocabulary; its place in the list is its id."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SpmModel:
    """What a .model file says. Flags have SentencePiece's defaults where the file is silent."""

    pieces: tuple[SpmPiece, ...]
    kind: str
    charsmap: bytes
    """Compiled rules such as NFKC; empty: text is left as it is."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    blank_after_word: bool
    """Blanks end a piece instead of beginning one."""

    @property
    def has_all_bytes(self) -> bool:
        return sum(piece.kind is PieceKind.BYTE for piece in self.pieces) == 256


def parse_spm_model(data: bytes, where: str) -> SpmModel:
    """Reads the file's bytes; `where` names it in errors."""
    pieces: list[SpmPiece] = []
    trainer: dict[int, int | bytes] = {}
    rules: dict[int, int | bytes] = {}
    try:
        for field, value in _fields(data):
            if field == 1 and isinstance(value, bytes):
                one = dict(_fields(value))
                text, score, kind = one.get(1, b""), one.get(2, b"\0\0\0\0"), one.get(3, 1)
                assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
                pieces.append(SpmPiece(text.decode("utf-8"), struct.unpack("<f", score)[0], PieceKind(kind)))
            elif field == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif field == 3 and isinstance(value, bytes):
                rules = dict(_fields(value))
        charsmap, kind = rules.get(2, b""), trainer.get(3, 1)
        assert isinstance(charsmap, bytes) and isinstance(kind, int)
        if not pieces:
            raise ValueError("it has no pieces")
        return SpmModel(
            pieces=tuple(pieces),
            kind=MODEL_KINDS[kind],
            charsmap=charsmap,
            add_dummy_prefix=bool(rules.get(3, 1)),
            remove_extra_whitespaces=bool(rules.get(4, 1)),
            escape_whitespaces=bool(rules.get(5, 1)),
            blank_after_word=bool(trainer.get(24, 0)),
        )
    except (ValueError, IndexError, KeyError, AssertionError, struct.error) as error:
        rule = f"not a SentencePiece model ({error or type(error).__name__})"
        raise DataError(where, rule, "Give a file that SentencePiece wrote, or a tokenizer.json.") from None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: integers as int, all else as bytes."""
    place = 0
    while place < len(data):
        key, place = _integer(data, place)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _integer(data, place)
            yield field, value
            continue
        if wire == 2:
            length, place = _integer(data, place)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {place}")
        if place + length > len(data):
            raise ValueError("it ends too early")
        yield field, data[place : place + length]
        place += length


def _integer(data: bytes, place: int) -> tuple[int, int]:
    """A varint and the place after it."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError(f"a number without end at byte {place}")
