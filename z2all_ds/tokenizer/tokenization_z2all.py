"""Encodes training text with the trained vocabulary: straight on `tokenizers`, without the weight of transformers.

A document may contain the text "<|endoftext|>", as this very file does. Here it is encoded as plain bytes, so no text
can forge a control token; control tokens are put in by number (`eot_id`), never by spelling.
"""

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from z2all_ds.errors import DataError
from z2all_ds.tokenizer.special_tokens import BEGIN_OF_TEXT, END_OF_TEXT, PAD, SPECIAL_TOKENS

TOKENIZER_FILE = "tokenizer.json"


class Z2allTokenizer:
    """Text to ids and back."""

    def __init__(self, backend: Tokenizer, fingerprint: str) -> None:
        backend.encode_special_tokens = True
        self._backend = backend
        self.fingerprint = fingerprint
        """SHA-256 of tokenizer.json; a run keeps it, as other merges mean other data."""
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        """Number of ids, control tokens included."""
        self.eot_id = self.special_id(END_OF_TEXT)
        self.pad_id = self.special_id(PAD)

    def special_id(self, token: str) -> int:
        """Number of a control token."""
        number: int | None = self._backend.token_to_id(token) if token in SPECIAL_TOKENS else None
        if number is None:
            rule = f"the tokenizer does not have it; those of a Z2all tokenizer are {', '.join(SPECIAL_TOKENS)}"
            raise DataError(f"control token {token!r}", rule, "Train the tokenizer with train_tokenizer.")
        return number

    @property
    def model_token_ids(self) -> dict[str, int]:
        """The ids a Hugging Face model config wants to know."""
        return {
            "bos_token_id": self.special_id(BEGIN_OF_TEXT),
            "eos_token_id": self.eot_id,
            "pad_token_id": self.pad_id,
        }

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, in parallel unless TOKENIZERS_PARALLELISM=false."""
        try:
            return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeEncodeError) as error:
            for number, text in enumerate(texts):
                _refuse_half_characters(number, text, error)
            raise

    def decode(self, ids: list[int]) -> str:
        """The text of the ids; control tokens come out in their spelling."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _refuse_half_characters(number: int, text: str, error: Exception) -> None:
    """A lone surrogate is not Unicode text, but Python strings can hold one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as detail:
        fix = "Clean it first: text.encode('utf-8', 'replace').decode()."
        raise DataError(f"text {number} of the batch", f"not valid Unicode ({detail.reason})", fix) from error


def load_tokenizer(folder: str | Path) -> Z2allTokenizer:
    """Opens a trained tokenizer folder."""
    path = Path(folder) / TOKENIZER_FILE
    fix = "Give the folder that train_tokenizer wrote, or train one."
    if not path.is_file():
        what = "the folder is incomplete" if path.parent.is_dir() else "no such folder"
        raise DataError(f"tokenizer {path}", f"{what}; a tokenizer folder holds {TOKENIZER_FILE}", fix)
    data = path.read_bytes()
    try:
        backend = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the Rust side raises bare Exception
        raise DataError(f"tokenizer {path}", f"not readable ({error})", fix) from None
    return Z2allTokenizer(backend, hashlib.sha256(data).hexdigest())
