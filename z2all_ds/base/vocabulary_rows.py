"""Which row of another model's vocabulary becomes which row of this one's. Pure, and without torch.

1. Where every id that both tokenizers have is the same token, rows keep their ids.
2. Else rows go by the text of their token, wherever the two have it.
3. Without the other tokenizer, rows keep their ids: nothing can be compared, and none may be cut off.

A row with no counterpart is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from z2all_ds.base.errors import ConfigError

NEW = -1


@dataclass(frozen=True)
class VocabularyRows:
    """For each row here, the number of the row there, or NEW."""

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
            "text": "by the text of tokens, as the two tokenizers number them differently",
            "unknown": "by id, unseen, as the folder has no tokenizer.json",
        }[self.by]
        return f"vocabulary {how}: {len(self.rows) - self.num_new} of {len(self.rows)} rows, {self.num_new} new"


def match_rows(
    tokens_here: Mapping[str, int], size_here: int, tokens_there: Mapping[str, int] | None, size_there: int
) -> VocabularyRows:
    """Sizes are those of the models, which may have more rows than their tokenizers have ids."""
    if tokens_there is None:
        if size_here < size_there:
            raise ConfigError(
                f"model.vocab_size={size_here}",
                f"the folder of train.init_from has {size_there} rows, and no tokenizer.json that says which are cut",
                f"Set model.vocab_size={size_there} or more, or put its tokenizer.json there.",
            )
        return VocabularyRows([row if row < size_there else NEW for row in range(size_here)], "unknown")
    here = {number: text for text, number in tokens_here.items()}
    there = {number: text for text, number in tokens_there.items()}
    if all(here[number] == there[number] for number in here.keys() & there.keys()):
        # An id that is nobody's is padding, and stays what it was; one that only this tokenizer has is a new token.
        rows = [
            row if row < size_there and (row in there or row not in here) else NEW for row in range(size_here)
        ]  # fmt: skip
        return VocabularyRows(rows, "id")
    known = {text: number for text, number in tokens_there.items() if number < size_there}
    rows = [known.get(here[row], NEW) if row in here else NEW for row in range(size_here)]
    if all(row == NEW for row in rows):
        what, rule = "data.tokenizer", "it has not one token of the folder of train.init_from"
        raise ConfigError(what, rule, "Use that folder's tokenizer: `z2all tokenizer import`.")
    return VocabularyRows(rows, "text")
