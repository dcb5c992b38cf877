"""Encodes text for training with `tokenizers` only; transformers is not loaded.

A document may contain the text "<|endoftext|>", as this file does. It is encoded as plain text, so no text can forge a
control token. Control tokens are inserted by id (`eot_id`), or parsed from text that the caller trusts
(`allowed_special`).
"""

import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer.special_tokens import BEGIN_OF_TEXT, END_OF_TEXT, PAD

TOKENIZER_FILE = "tokenizer.json"
AllowedSpecial = Literal["all", "none_raise"] | Collection[str]
"""Control tokens to parse from text: none (the default), some names, or "all". "none_raise" refuses a text that
contains one."""


class Z2allTokenizer:
    """Converts text to ids and back."""

    def __init__(self, backend: Tokenizer, fingerprint: str) -> None:
        backend.encode_special_tokens = True
        self._backend = backend
        self.fingerprint = fingerprint
        """SHA-256 of tokenizer.json; a run stores it, as other merges give other data."""
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special
        }
        """Ids of all control tokens."""
        self.size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Number of ids, including control tokens."""
        self.eot_id = self.special_id(END_OF_TEXT)
        self.pad_id = self.special_id(PAD)

    def special_id(self, token: str) -> int:
        """Return the id of a control token."""
        if token not in self.special_tokens:
            rule = f"not in the tokenizer, which has {', '.join(self.special_tokens) or 'none'}"
            fix = "Create the folder with `z2all tokenizer train` or `z2all tokenizer import`."
            raise DataError(f"control token {token!r}", rule, fix)
        return self.special_tokens[token]

    @property
    def model_token_ids(self) -> dict[str, int]:
        """The token ids of a Hugging Face model config."""
        return {
            "bos_token_id": self.special_id(BEGIN_OF_TEXT),
            "eos_token_id": self.eot_id,
            "pad_token_id": self.pad_id,
        }

    def encode(self, text: str, allowed_special: AllowedSpecial = ()) -> list[int]:
        """Return the ids of a text; add nothing at either end."""
        return self.encode_batch([text], allowed_special)[0]

    def encode_batch(self, texts: Sequence[str], allowed_special: AllowedSpecial = ()) -> list[list[int]]:
        """Return the ids of each text; run in parallel unless TOKENIZERS_PARALLELISM=false."""
        if isinstance(allowed_special, str) and allowed_special == "none_raise":
            self._refuse_control_tokens(texts)
        elif allowed_special:
            return self._encode_with(texts, allowed_special)
        return self._encode_plain(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; control tokens by name, invalid UTF-8 as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def encode_bytes(self, data: bytes) -> list[int]:
        """Return the ids of any bytes: valid UTF-8 as text, the rest byte by byte. `decode_bytes` inverts it."""
        if self.byte_table is None:
            rule = "it has no token for each byte, or changes text before encoding"
            raise DataError("raw bytes with this tokenizer", rule, "Encode text with encode(), or train a tokenizer.")
        parts = [part for part in re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape")) if part]
        is_raw = ["\udc80" <= part[0] <= "\udcff" for part in parts]
        encoded = iter(self._encode_plain([part for part, raw in zip(parts, is_raw, strict=True) if not raw]))
        ids: list[int] = []
        for part, raw in zip(parts, is_raw, strict=True):
            ids += [self.byte_table.id_of_byte[ord(char) - 0xDC00] for char in part] if raw else next(encoded)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the exact bytes of the ids."""
        if self.byte_table is None:
            return self.decode(ids).encode("utf-8")
        try:
            return b"".join([self.byte_table.bytes_of_id[number] for number in ids])
        except KeyError as error:
            raise DataError(f"token id {error.args[0]}", f"ids are 0 to {self.size - 1}", "Check the ids.") from None

    @cached_property
    def byte_table(self) -> "ByteTable | None":
        return byte_table(self._backend)

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:
            for number, text in enumerate(texts):
                try:
                    text.encode("utf-8")  # fails for a lone surrogate
                except UnicodeEncodeError as detail:
                    fix = "Clean it first: text.encode('utf-8', 'replace').decode()."
                    rule = f"not valid Unicode ({detail.reason})"
                    raise DataError(f"text {number} of the batch", rule, fix) from error
            raise

    def _encode_with(self, texts: Sequence[str], allowed: AllowedSpecial) -> list[list[int]]:
        """Split each text at the allowed control tokens and encode all other parts in one batch."""
        if isinstance(allowed, str):
            if allowed != "all":
                rule = "must be a set of names, 'all' or 'none_raise'"
                raise DataError(f"allowed_special {allowed!r}", rule, f"To allow one token, write {{{allowed!r}}}.")
            allowed = self.special_tokens
        numbers = {name: self.special_id(name) for name in allowed}
        separator = re.compile(f"({_any_of(numbers)})")
        parts = [[part for part in separator.split(text) if part] for text in texts]
        encoded = iter(self._encode_plain([part for some in parts for part in some if part not in numbers]))
        return [
            [number for part in some for number in ([numbers[part]] if part in numbers else next(encoded))]
            for some in parts
        ]

    def _refuse_control_tokens(self, texts: Sequence[str]) -> None:
        pattern = re.compile(_any_of(self.special_tokens))
        for number, text in enumerate(texts):
            if found := pattern.search(text):
                where = f"text {number} of the batch, " if len(texts) > 1 else ""
                rule = "the text contains a control token, and none is allowed here"
                fix = "Remove it, or encode without allowed_special: then it is plain text."
                raise DataError(f"{where}character {found.start()}, {found.group()!r}", rule, fix)


def _any_of(names: Collection[str]) -> str:
    """Return a pattern that matches any name; the longest first, as one may be a prefix of another."""
    return "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name)))


def load_tokenizer(folder: str | Path) -> Z2allTokenizer:
    """Open a tokenizer folder."""
    path = Path(folder) / TOKENIZER_FILE
    fix = "Give a folder written by `z2all tokenizer train` or `z2all tokenizer import`."
    if not path.is_file():
        what = "the folder is incomplete" if path.parent.is_dir() else "no such folder"
        raise DataError(f"tokenizer {path}", f"{what}; a tokenizer folder has {TOKENIZER_FILE}", fix)
    data = path.read_bytes()
    return Z2allTokenizer(parse_tokenizer_json(data, f"tokenizer {path}", fix), hashlib.sha256(data).hexdigest())


def parse_tokenizer_json(data: bytes, where: str, fix: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise DataError(where, f"not readable ({error})", fix) from None


@lru_cache(maxsize=1)
def worker_tokenizer(folder: str, fingerprint: str, threads: int = 1) -> Z2allTokenizer:
    """Open a tokenizer folder once per worker process, and limit its threads (the default is one per core)."""
    if multiprocessing.parent_process() is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"tokenizer {folder}", "changed during the work", "Do not change it, and run again.")
    return tokenizer


# Bytes of tokens


class ByteTable(NamedTuple):
    """The bytes of every token of a vocabulary."""

    bytes_of_id: Mapping[int, bytes]
    id_of_byte: tuple[int, ...]


def byte_table(backend: Tokenizer) -> ByteTable | None:
    """Return the table, or None for a tokenizer that lacks some byte or changes text.

    Byte-level BPE writes every byte as a printable character ("Ġ" is a space); SentencePiece has tokens "<0x00>" to
    "<0xFF>" in addition to its text.
    """
    rules = json.loads(backend.to_str())
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    if rules["normalizer"] is not None or _changes_text(rules["pre_tokenizer"]):
        return None
    decoder = rules["decoder"] or {"type": None}
    kinds = [step["type"] for step in decoder.get("decoders", [decoder])]
    if kinds == ["ByteLevel"]:
        # Printable bytes represent themselves, the others the characters from 256 on.
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        moved = iter(range(0x100, 0x200))
        byte_of = {chr(byte if byte in printable else next(moved)): byte for byte in range(256)}
    elif kinds == ["ByteFallback", "Fuse"]:
        byte_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
    else:
        return None
    if not byte_of.keys() <= vocabulary.keys():
        return None

    def bytes_of(token: str) -> bytes:
        units = list(token) if kinds == ["ByteLevel"] else [token]
        known = all(unit in byte_of for unit in units)
        return bytes(byte_of[unit] for unit in units) if known else token.encode("utf-8")

    bytes_of_id = {number: bytes_of(token) for token, number in vocabulary.items()}
    bytes_of_id |= {number: token.content.encode() for number, token in backend.get_added_tokens_decoder().items()}
    return ByteTable(bytes_of_id, tuple(vocabulary[name] for name in byte_of))


def _changes_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer does more than split: replaces or adds spaces, or drops separators."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(_changes_text(one) for one in pre_tokenizer["pretokenizers"])
    if pre_tokenizer["type"] == "ByteLevel":
        return bool(pre_tokenizer["add_prefix_space"])
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] == "Removed")
    return pre_tokenizer["type"] not in ("Digits", "Punctuation", "UnicodeScripts")
