"""Encodes training text with the trained vocabulary: straight on `tokenizers`, without the weight of transformers.

A document may contain the text "<|endoftext|>", as this very file does. Here it is encoded as plain text, so no text
can forge a control token. Control tokens are put in by number (`eot_id`), or by spelling where the caller opens the
door (`allowed_special`) for text of its own making.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from z2all_ds.base.errors import DataError
from z2all_ds.tokenizer.raw_bytes import ByteTable
from z2all_ds.tokenizer.special_tokens import BEGIN_OF_TEXT, END_OF_TEXT, PAD

TOKENIZER_FILE = "tokenizer.json"
AllowedSpecial = Literal["all", "none_raise"] | Collection[str]
"""Control tokens that are read from their spelling: none (the default), some names, "all"; or "none_raise": refuse a
text that spells one."""


class Z2allTokenizer:
    """Text to ids and back."""

    def __init__(self, backend: Tokenizer, fingerprint: str) -> None:
        backend.encode_special_tokens = True
        self._backend = backend
        self.fingerprint = fingerprint
        """SHA-256 of tokenizer.json; a run keeps it, as other merges mean other data."""
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special
        }
        """Every control token and its number."""
        self.size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Number of ids, control tokens included."""
        self.eot_id = self.special_id(END_OF_TEXT)
        self.pad_id = self.special_id(PAD)

    def special_id(self, token: str) -> int:
        """Number of a control token."""
        if token not in self.special_tokens:
            rule = f"the tokenizer does not have it; it has {', '.join(self.special_tokens) or 'none'}"
            fix = "Make the folder with `z2all tokenizer train` or `z2all tokenizer import`."
            raise DataError(f"control token {token!r}", rule, fix)
        return self.special_tokens[token]

    @property
    def model_token_ids(self) -> dict[str, int]:
        """The ids a Hugging Face model config wants to know."""
        return {
            "bos_token_id": self.special_id(BEGIN_OF_TEXT),
            "eos_token_id": self.eot_id,
            "pad_token_id": self.pad_id,
        }

    def encode(self, text: str, allowed_special: AllowedSpecial = ()) -> list[int]:
        """Ids of a text; nothing is added at either end."""
        return self.encode_batch([text], allowed_special)[0]

    def encode_batch(self, texts: Sequence[str], allowed_special: AllowedSpecial = ()) -> list[list[int]]:
        """Ids of each text, in parallel unless TOKENIZERS_PARALLELISM=false."""
        if isinstance(allowed_special, str) and allowed_special == "none_raise":
            self._refuse_control_text(texts)
        elif allowed_special:
            return self._encode_with(texts, allowed_special)
        return self._encode_plain(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; control tokens come out in their spelling, broken characters as U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of any bytes: UTF-8 stretches as text, the rest byte by byte. `decode_bytes` gives `data` back."""
        if self._bytes is None:
            rule = "it has no token for each byte, or changes text before encoding it"
            raise DataError("raw bytes with this tokenizer", rule, "Encode text with encode(), or train a tokenizer.")
        parts = [part for part in re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape")) if part]
        stray = ["\udc80" <= part[0] <= "\udcff" for part in parts]
        encoded = iter(self._encode_plain([part for part, odd in zip(parts, stray, strict=True) if not odd]))
        ids: list[int] = []
        for part, odd in zip(parts, stray, strict=True):
            ids += [self._bytes.id_of_byte[ord(char) - 0xDC00] for char in part] if odd else next(encoded)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The very bytes the ids stand for."""
        if self._bytes is None:
            return self.decode(ids).encode("utf-8")
        try:
            return b"".join([self._bytes.bytes_of_id[number] for number in ids])
        except KeyError as error:
            raise DataError(f"token id {error.args[0]}", f"ids are 0 to {self.size - 1}", "Check the ids.") from None

    @cached_property
    def _bytes(self) -> ByteTable | None:
        return ByteTable.of(self._backend)

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:
            for number, text in enumerate(texts):
                _refuse_half_characters(number, text, error)
            raise

    def _encode_with(self, texts: Sequence[str], allowed: AllowedSpecial) -> list[list[int]]:
        """Control tokens cut each text first; all the stretches between them go through in one batch."""
        if isinstance(allowed, str):
            if allowed != "all":
                rule = "takes a set of names, 'all' or 'none_raise'"
                raise DataError(f"allowed_special {allowed!r}", rule, f"To allow one token, write {{{allowed!r}}}.")
            allowed = self.special_tokens
        numbers = {name: self.special_id(name) for name in allowed}
        cut = re.compile(f"({_any_of(numbers)})")
        parts = [[part for part in cut.split(text) if part] for text in texts]
        encoded = iter(self._encode_plain([part for some in parts for part in some if part not in numbers]))
        return [
            [number for part in some for number in ([numbers[part]] if part in numbers else next(encoded))]
            for some in parts
        ]

    def _refuse_control_text(self, texts: Sequence[str]) -> None:
        spelled = re.compile(_any_of(self.special_tokens))
        for number, text in enumerate(texts):
            if found := spelled.search(text):
                where = f"text {number} of the batch, " if len(texts) > 1 else ""
                rule = "the text spells a control token, and none is allowed here"
                fix = "Remove it, or encode without allowed_special: then it is plain text."
                raise DataError(f"{where}character {found.start()}, {found.group()!r}", rule, fix)


def _any_of(names: Collection[str]) -> str:
    """A pattern; the longest name first, as one may begin another."""
    return "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name)))


def _refuse_half_characters(number: int, text: str, error: Exception) -> None:
    """A lone surrogate is not Unicode text, but Python strings can hold one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as detail:
        fix = "Clean it first: text.encode('utf-8', 'replace').decode()."
        raise DataError(f"text {number} of the batch", f"not valid Unicode ({detail.reason})", fix) from error


def load_tokenizer(folder: str | Path) -> Z2allTokenizer:
    """Opens a tokenizer folder."""
    path = Path(folder) / TOKENIZER_FILE
    fix = "Give the folder that `z2all tokenizer train` or `import` wrote, or train one."
    if not path.is_file():
        what = "the folder is incomplete" if path.parent.is_dir() else "no such folder"
        raise DataError(f"tokenizer {path}", f"{what}; a tokenizer folder holds {TOKENIZER_FILE}", fix)
    data = path.read_bytes()
    try:
        backend = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the Rust side raises bare Exception
        raise DataError(f"tokenizer {path}", f"not readable ({error})", fix) from None
    return Z2allTokenizer(backend, hashlib.sha256(data).hexdigest())
