"""Encodes text for training with `tokenizers` only; transformers is not loaded.

A document may contain the text "<|endoftext|>", as this file does. It is encoded as plain text, so no text can forge a
control token. Control tokens are inserted by id (`eot_id`), or parsed from text that the caller trusts
(`allowed_special`). Any tokenizer of Hugging Face works as it is: the end-of-text token that its config names ends
documents, and its ids do not change.
"""

import hashlib
import json
import math
import multiprocessing
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from z2all_ds.base.errors import DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.tokenizer.declared_tokens import CONFIG_FILE, declared_tokens, find_roles, read_roles
from z2all_ds.tokenizer.special_tokens import END_OF_TEXT

TOKENIZER_FILE = "tokenizer.json"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A byte that SentencePiece models write instead of an unknown character."""
MAX_GROWTH = 1000
"""By which the replacements of a normalizer may lengthen a text. Usual ones keep its length, or add one character."""
AllowedSpecial = Literal["all", "none_raise"] | Collection[str]
"""Control tokens to parse from text: none (the default), some names, or "all". "none_raise" refuses a text that
contains one."""


class Z2allTokenizer:
    """Converts text to ids and back."""

    def __init__(
        self,
        backend: Tokenizer,
        fingerprint: str,
        roles: Mapping[str, str] | None = None,
        declared: Collection[str] = (),
    ) -> None:
        """Wrap a backend; `roles` are the names of its tokens by their keys in transformers (`eos_token`), `declared`
        further control tokens."""
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.fingerprint = fingerprint
        """SHA-256 of tokenizer.json and what else decides about ids; a run stores it, as other ids are other data."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.roles = find_roles(vocabulary, roles or {})
        """Names of the tokens that exist, by their keys in transformers."""
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special
        }
        """Ids of all control tokens."""
        end = {"eos_token": self.roles.get("eos_token", "")}
        undeclared = {*self.special_tokens, *find_roles(vocabulary, end).values()}
        names = [*self.roles.values(), *(name for name in sorted(declared) if name in vocabulary)]
        self.special_tokens |= {name: vocabulary[name] for name in names}
        kept = sorted(reachable(backend, self.special_tokens))
        self.kept_from_text = None if kept == sorted(reachable(backend, undeclared)) else kept
        """Control tokens that text could make. None if they follow from tokenizer.json and the end-of-text token."""
        self.size: int = max(vocabulary.values(), default=-1) + 1
        """Number of ids, including control tokens."""
        self._text_backend = text_only(backend, self.special_tokens)
        if "eos_token" not in self.roles:
            rule = f"has no end-of-text token to end documents with, of {', '.join(self.special_tokens) or 'no'} tokens"
            fix = f"Name it as eos_token in {CONFIG_FILE}, or use `z2all tokenizer import FOLDER --out NEW --eos NAME`."
            raise DataError("tokenizer", rule, fix)
        self.eot_id = vocabulary[self.roles["eos_token"]]
        self.pad_id = vocabulary[self.roles.get("pad_token", self.roles["eos_token"])]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy in another process: pickling a backend loses that control tokens in text are plain text."""
        self.__dict__.update(state)
        self._backend.encode_special_tokens = self._text_backend.encode_special_tokens = True

    def special_id(self, token: str) -> int:
        """Return the id of a control token."""
        if token not in self.special_tokens:
            rule = f"not in the tokenizer, which has {', '.join(self.special_tokens) or 'none'}"
            fix = "Create the folder with `z2all tokenizer train` or `z2all tokenizer import`."
            raise DataError(f"control token {token!r}", rule, fix)
        return self.special_tokens[token]

    @property
    def model_token_ids(self) -> dict[str, int | None]:
        """The token ids of a Hugging Face model config; None for a token that the tokenizer does not have."""
        found = {role: self.special_tokens[name] for role, name in self.roles.items()}
        return {f"{role}_id": found.get(role) for role in ("bos_token", "eos_token", "pad_token")}

    @cached_property
    def begins_texts(self) -> bool:
        """Whether it puts the begin-of-text token before a text where transformers uses it."""
        begin = self.model_token_ids["bos_token_id"]
        return begin is not None and self._backend.encode("x", add_special_tokens=True).ids[:1] == [begin]

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
            return [found.ids for found in self._text_backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:
            for number, text in enumerate(texts):
                try:
                    text.encode("utf-8")  # fails for a lone surrogate
                except UnicodeEncodeError as detail:
                    fix = "Clean it first: text.encode('utf-8', 'replace').decode()."
                    rule = f"not valid Unicode ({detail.reason})"
                    raise DataError(f"text {number} of the batch", rule, fix) from error
            raise
        except BaseException:  # such as a missing token for unknown text
            with explain_content(DataError, "tokenizer", "cannot encode this text", "Use another tokenizer."):
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


def text_only(backend: Tokenizer, control_tokens: Collection[str]) -> Tokenizer:
    """Return a backend with the same ids that gives no control token for any text; the same one if it never does.

    Tokens that text can reach get names that no text can contain.
    """
    names = {name: secrets.token_hex(16) for name in reachable(backend, control_tokens)}
    if not names:
        return backend
    rules: dict[str, Any] = json.loads(backend.to_str())
    model = rules["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else pair for pair in model["merges"]]
        merges = [(left, right, left + right.removeprefix(prefix)) for left, right in pairs]
        model["merges"] = [merge[:2] for merge in merges if names.keys().isdisjoint(merge)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    for token in rules["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    rules["post_processor"] = None
    plain = Tokenizer.from_str(json.dumps(rules, ensure_ascii=False))
    plain.encode_special_tokens = True
    return plain


def reachable(backend: Tokenizer, control_tokens: Collection[str]) -> list[str]:
    """Return the control tokens that text may make although the backend has `encode_special_tokens`.

    That is enough for tokens that are only added. Others are in the vocabulary of the model too (unigram models contain
    "</s>"), or are added without the mark of a control token. A single character is text.
    """
    found = backend.get_added_tokens_decoder().values()
    names = backend.get_vocab(with_added_tokens=False).keys() | {one.content for one in found if not one.special}
    return [name for name in without_bytes(backend, control_tokens) if len(name) > 1 and name in names]


def without_bytes(backend: Tokenizer, names: Collection[str]) -> list[str]:
    """Return the names without those of bytes, which a model with byte fallback makes from text."""
    found = {name for name in names if _BYTE.fullmatch(name)}
    has_bytes = found and json.loads(backend.to_str())["model"].get("byte_fallback")  # unigram models do not tell it
    return [name for name in names if not (has_bytes and name in found)]


def _any_of(names: Collection[str]) -> str:
    """Return a pattern that matches any name; the longest first, as one may be a prefix of another."""
    return "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name)))


def load_tokenizer(folder: str | Path) -> Z2allTokenizer:
    """Open a tokenizer folder: one of this package, or any Hugging Face folder with a tokenizer.json."""
    path = Path(folder) / TOKENIZER_FILE
    fix = "Give a Hugging Face folder with it; `z2all tokenizer import` makes one from other files."
    if not path.is_file():
        what = "the folder is incomplete" if path.parent.is_dir() else "no such folder"
        raise DataError(f"tokenizer {path}", f"{what}; a tokenizer folder has {TOKENIZER_FILE}", fix)
    data = read_regular(path)
    backend = parse_tokenizer_json(data, f"tokenizer {path}", fix)
    with explain_content(DataError, f"tokenizer {path}", "does not work", fix):
        tokenizer = Z2allTokenizer(backend, "", read_roles(path.parent), declared_tokens(path.parent))
    end = tokenizer.roles["eos_token"]
    if end != END_OF_TEXT:  # another end of documents is other data, too
        data += end.encode()
    if tokenizer.kept_from_text is not None:  # so is text that would be encoded otherwise without the other files
        data += json.dumps(tokenizer.kept_from_text).encode()
    tokenizer.fingerprint = hashlib.sha256(data).hexdigest()
    return tokenizer


def parse_tokenizer_json(data: bytes, where: str, fix: str) -> Tokenizer:
    with explain_content(DataError, where, "not readable", fix):
        check_merges(data)
        check_growth(data)
        backend = Tokenizer.from_str(data.decode("utf-8"))
        backend.encode("")  # some mistakes show only now
        return backend


def check_merges(data: bytes) -> None:
    """Raise a ValueError if merges lack the prefix that the model gives to continuing pieces: `tokenizers` cuts off
    that many bytes, and aborts the process if this cuts a character in two."""
    if not re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', data):
        return
    model = load_json(data)["model"]
    prefix = model["continuing_subword_prefix"]
    for pair in model.get("merges") or ():
        right = (pair.split(" ", 1) if isinstance(pair, str) else pair)[1]
        if not right.startswith(prefix):
            raise ValueError(f"merge {pair!r} does not continue with {prefix!r}")


def check_growth(data: bytes) -> None:
    """Raise a ValueError if the replacements of the normalizer, one after another, could fill the memory."""
    if re.search(rb"Replace|\\u00", data):  # the name may be written with escapes
        growth = _growth(load_json(data).get("normalizer") or {})
        if growth > MAX_GROWTH:
            raise ValueError(f"its normalizer can make a text {growth:.3g} times longer, the limit is {MAX_GROWTH}")


def _growth(rule: dict[str, Any]) -> float:
    if "normalizers" in rule:
        return math.prod(map(_growth, rule["normalizers"]))
    replaced = rule["pattern"].get("String", "") if "pattern" in rule else ""
    return max(1.0, len(rule.get("content", "")) / max(1, len(replaced)))


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
