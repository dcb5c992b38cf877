"""Mapping of the vocabulary rows of another model to the rows of this one. Pure functions, no torch.

1. If all ids that both tokenizers have stand for the same tokens, rows keep their ids.
2. Otherwise rows are matched by the text of their token.
3. Without the other tokenizer, rows keep their ids: nothing can be compared, so no row may be cut off.

A row with no counterpart is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from z2all_ds.base.errors import ConfigError

NEW = -1


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
