"""Which bytes each token stands for, so that any bytes can be encoded and come back, also those that are not UTF-8.

Two ways to spell bytes exist. Byte-level BPE writes every byte as a printable character ("Ġ" is a space); SentencePiece
has tokens "<0x00>" to "<0xFF>" beside its text.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def byte_characters() -> dict[str, int]:
    """Character -> byte, as in byte-level BPE: printable ones stand for themselves, the others move beyond 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(moved)): byte for byte in range(256)}


@dataclass(frozen=True)
class ByteTable:
    """Token -> bytes for a whole vocabulary."""

    bytes_of_id: Mapping[int, bytes]
    id_of_byte: tuple[int, ...]

    @classmethod
    def of(cls, backend: Tokenizer) -> "ByteTable | None":
        """The table, or None for a tokenizer that cannot hold every byte or changes text."""
        rules = json.loads(backend.to_str())
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
        if rules["normalizer"] is not None or _changes_text(rules["pre_tokenizer"]):
            return None
        kind = _kinds(rules["decoder"])
        if kind == ["ByteLevel"]:
            characters = byte_characters()
            if any(char not in vocabulary for char in characters):
                return None
            spelled = {number: _byte_level(token, characters) for token, number in vocabulary.items()}
            id_of_byte = tuple(vocabulary[char] for char in characters)
        elif kind == ["ByteFallback", "Fuse"]:
            names = [f"<0x{byte:02X}>" for byte in range(256)]
            if any(name not in vocabulary for name in names):
                return None
            spelled = {number: _fallback(token) for token, number in vocabulary.items()}
            id_of_byte = tuple(vocabulary[name] for name in names)
        else:
            return None
        spelled |= {number: token.content.encode() for number, token in backend.get_added_tokens_decoder().items()}
        return cls(spelled, id_of_byte)


def _byte_level(token: str, characters: dict[str, int]) -> bytes:
    if all(char in characters for char in token):
        return bytes(characters[char] for char in token)
    return token.encode("utf-8")


def _fallback(token: str) -> bytes:
    found = BYTE_TOKEN.fullmatch(token)
    return bytes([int(found.group(1), 16)]) if found else token.encode("utf-8")


def _kinds(part: dict[str, Any] | None) -> list[str]:
    """Names of the steps of a decoder or pre-tokenizer."""
    if part is None:
        return []
    inner = part.get("decoders") or part.get("pretokenizers") or part.get("normalizers")
    return [name for one in inner for name in _kinds(one)] if inner else [part["type"]]


def _changes_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    """A pre-tokenizer may only cut. Others replace blanks, drop what they cut at, or put a blank in front."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_changes_text(one) for one in pre_tokenizer["pretokenizers"])
    if pre_tokenizer["type"] == "ByteLevel":
        return bool(pre_tokenizer["add_prefix_space"])
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] == "Removed")
    return pre_tokenizer["type"] not in ("Digits", "Punctuation", "UnicodeScripts")
