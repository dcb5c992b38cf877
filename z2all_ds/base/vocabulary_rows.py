"""Rows of the vocabulary: their number for a tokenizer, and their mapping from those of another model. No torch.

1. If all ids that both tokenizers have stand for the same tokens, rows keep their ids.
2. Otherwise rows are matched by the text of their token.
3. Without the other tokenizer, rows keep their ids: nothing can be compared, so no row may be cut off.

A row with no counterpart is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import expanded
from z2all_ds.base.storage.open_files import read_regular

NEW = -1
AUTO = "auto"
ROW_MULTIPLE = 64
"""Matrix products are fastest with multiples of 64."""


@dataclass(frozen=True)
class VocabularyRows:
    """For each row of this model, the row of the other model, or NEW."""

    rows: list[int]
    by: Literal["id", "text", "unknown"]

    @property
    def num_new(self) -> int:
        return self.rows.count(NEW)

    @property
    def are_all_the_same(self) -> bool:
        return self.rows == list(range(len(self.rows)))

    def words(self) -> str:
        how = {
            "id": "by id",
            "text": "by token text, as the two tokenizers number them differently",
            "unknown": "by id, unchecked, as the folder has no tokenizer.json",
        }[self.by]
        return f"vocabulary {how}: {len(self.rows) - self.num_new} of {len(self.rows)} rows, {self.num_new} new"


def match_rows(
    tokens_here: Mapping[str, int], size_here: int, tokens_there: Mapping[str, int] | None, size_there: int
) -> VocabularyRows:
    """Match rows. Sizes are those of the models, which may have more rows than their tokenizers have ids."""
    if tokens_there is None:
        if size_here < size_there:
            raise ConfigError(
                f"model.vocab_size={size_here}",
                f"the train.init_from folder has {size_there} rows, and no tokenizer.json to tell which are used",
                f"Set model.vocab_size={size_there} or more, or add its tokenizer.json to the folder.",
            )
        return VocabularyRows([row if row < size_there else NEW for row in range(size_here)], "unknown")
    here = {number: text for text, number in tokens_here.items()}
    there = {number: text for text, number in tokens_there.items()}
    if all(here[number] == there[number] for number in here.keys() & there.keys()):
        # An id without a token is padding and keeps its row; an id that only this tokenizer has is a new token.
        rows = [
            row if row < size_there and (row in there or row not in here) else NEW for row in range(size_here)
        ]  # fmt: skip
        return VocabularyRows(rows, "id")
    known = {text: number for text, number in tokens_there.items() if number < size_there}
    rows = [known.get(here[row], NEW) if row in here else NEW for row in range(size_here)]
    if all(row == NEW for row in rows):
        what, rule = "data.tokenizer", "it has no token in common with the train.init_from folder"
        raise ConfigError(what, rule, "Use that folder's tokenizer: `z2all tokenizer import`.")
    return VocabularyRows(rows, "text")


def tokens_in(tokenizer_json: dict[str, Any]) -> dict[str, int]:
    """Return token text -> id, control tokens included."""
    vocabulary = (tokenizer_json.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram models store [text, score] in the order of ids
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in tokenizer_json.get("added_tokens") or []}
    tokens = {**vocabulary, **added}
    if not all(type(number) is int and number >= 0 for number in tokens.values()):
        raise ValueError("an id of a token is not a whole number")
    return tokens


def rounded_rows(num_ids: int) -> int:
    """Return the rows for a number of ids: the next multiple of 64."""
    return -(-num_ids // ROW_MULTIPLE) * ROW_MULTIPLE


def automatic_size(tokenizer: str, init_from: str) -> int:
    """Return the value of `model.vocab_size=auto`: the rows of the init_from folder if they suffice, else the ids of
    the tokenizer, rounded up."""
    what = f"model.vocab_size={AUTO}"
    if not tokenizer:
        raise ConfigError(what, "needs a tokenizer to count its ids", "Give data.tokenizer=PATH, or a number.")
    try:
        num_ids = max(tokens_in(_read_json(Path(tokenizer) / "tokenizer.json")).values()) + 1
        rows = _read_json(Path(init_from) / "config.json").get("vocab_size") if init_from else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "Give a folder with a tokenizer.json as data.tokenizer, or a number."
        raise ConfigError(what, f"its ids cannot be counted ({error})", fix) from None
    return rows if type(rows) is int and rows >= num_ids else rounded_rows(num_ids)


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = load_json(read_regular(expanded(path)))
    return content
