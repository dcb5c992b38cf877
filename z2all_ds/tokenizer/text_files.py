"""Reads plain files as training text: .jsonl with a `text` or `content` field, others as UTF-8 in blocks of lines.

Both are streamed. A piece is parsed on request, so skipped pieces cost only the reading.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from z2all_ds.base.errors import DataError
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.schema import has_lone_surrogate

TextPiece = tuple[int, Callable[[], str]]
"""Bytes of a piece of text on disk, and a function that returns the text."""

BLOCK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is split between two characters; some files are one line."""
TEXT_FIELDS = ("text", "content")


def file_pieces(path: Path) -> Iterator[TextPiece]:
    """Yield the pieces of a file in order."""
    try:
        yield from (_json_lines(path) if path.suffix == ".jsonl" else _text_blocks(path))
    except OSError as error:
        raise DataError(f"file {path}", f"not readable ({error.strerror})", "Give a file of UTF-8 text.") from None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _json_lines(path: Path) -> Iterator[TextPiece]:
    with os.fdopen(open_regular(path), "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.isspace():
                yield len(line), lambda line=line, number=number: _text_of(line, f"{path}:{number}")  # type: ignore[misc]


def _text_of(line: bytes, where: str) -> str:
    fix = "Repair or remove that line."
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(where, f"not UTF-8 ({error.reason} at byte {error.start})", fix) from None
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"not JSON ({error})", fix) from None
    text = next((values[name] for name in TEXT_FIELDS if name in values), None) if isinstance(values, dict) else None
    if not isinstance(text, str):
        raise DataError(where, f"each line is an object with a string under {' or '.join(TEXT_FIELDS)}", fix)
    if has_lone_surrogate(text):
        raise DataError(f"{where} contains half a surrogate pair", "text must be valid Unicode", fix)
    return text


def _text_blocks(path: Path) -> Iterator[TextPiece]:
    position, rest = 0, b""
    with os.fdopen(open_regular(path), "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            rest += block
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) >= LONGEST_LINE_BYTES:
                cut = _last_character(rest)
            if cut:
                yield cut, _decoder(rest[:cut], path, position)
                position, rest = position + cut, rest[cut:]
    if rest:
        yield len(rest), _decoder(rest, path, position)


def _last_character(data: bytes) -> int:
    """Return the start of the last, possibly incomplete, character."""
    for back in range(1, 5):
        if data[-back] & 0xC0 != 0x80:
            return len(data) - back
    return len(data)  # not UTF-8; decoding reports it


def _decoder(data: bytes, path: Path, position: int) -> Callable[[], str]:
    def decode() -> str:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            rule = f"not UTF-8 ({error.reason} at byte {position + error.start})"
            raise DataError(f"file {path}", rule, "Convert it first, e.g. with iconv -t UTF-8.") from None
        return text.removeprefix("\ufeff") if position == 0 else text

    return decode
