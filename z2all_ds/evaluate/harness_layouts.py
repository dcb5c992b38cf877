"""Location of question, options and answer in a benchmark's documents, to read, reshape and write them back.

Detected automatically: `choices: {text, label}` with `answerKey` (ARC), a list of options with an answer (MMLU), and
one column per letter with an answer (C-Eval, CMMLU). Others are set with --fields. The harness decides which option is
right: so an answer may be a number from 0 or from 1, a letter or the option's own text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.reshaping import CHINESE_NUMERALS, Question

QUESTION_FIELDS = ("question", "Question", "question_stem", "query", "text", "prompt", "input", "ctx")
OPTION_FIELDS = ("choices", "options", "endings", "Choices", "Options")
ANSWER_FIELDS = ("answer", "Answer", "answerKey", "answer_key", "gold", "label", "target", "answer_index")
LETTERS = "ABCDEFGHIJKLMNOPQRST"
Document = Mapping[str, Any]

assert len(LETTERS) == len(CHINESE_NUMERALS)


@dataclass(frozen=True)
class Layout:
    """Names of a document's fields. `options`: one field with all options, or one field per option."""

    question: str
    options: tuple[str, ...]
    answer: str

    def read(self, document: Document, gold: int) -> Question:
        """Return the question; `gold` is the index of the right option according to the harness."""
        options = self._options(document)
        return Question(str(document[self.question]), tuple(options), gold, self._labels(document, len(options)))

    def write(self, document: Document, old: Question, new: Question) -> dict[str, Any]:
        """Return the document with the options and the answer of `new` in its original format."""
        written = dict(document)
        if len(self.options) > 1:
            written.update(zip(self.options, new.options, strict=True))
        elif isinstance(document[self.options[0]], Mapping):
            written[self.options[0]] = {**document[self.options[0]], "text": list(new.options)}
        else:
            written[self.options[0]] = list(new.options)
        written[self.answer] = _encoded(document[self.answer], old, new)
        return written

    def understands(self, document: Document, gold: int) -> bool:
        """Return whether all fields exist, the right option is one of the options, and the answer can be written."""
        if any(name not in document for name in (self.question, self.answer, *self.options)):
            return False
        try:
            question = self.read(document, gold)
            _encoded(document[self.answer], question, question)
        except (LookupError, TypeError, ValueError):
            return False
        return 0 <= gold < len(question.options) == len(question.labels) <= len(LETTERS)

    def _options(self, document: Document) -> list[str]:
        if len(self.options) > 1:
            return [str(document[name]) for name in self.options]
        held = document[self.options[0]]
        texts = held["text"] if isinstance(held, Mapping) else held
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"{self.options[0]} is not a list")
        return [str(text) for text in texts]

    def _labels(self, document: Document, count: int) -> tuple[str, ...]:
        held = document[self.options[0]]
        if isinstance(held, Mapping) and "label" in held:
            return tuple(str(label) for label in held["label"])
        return tuple(LETTERS[:count])


def _encoded(value: Any, old: Question, new: Question) -> Any:
    """Return the answer `new.gold` in the format in which `value` states `old.gold`; ValueError if it is unknown."""
    if isinstance(value, list) and len(value) == 1:
        return [_encoded(value[0], old, new)]
    if isinstance(value, int) and not isinstance(value, bool) and value - old.gold in (0, 1):
        return value - old.gold + new.gold
    if isinstance(value, str):
        bare = value.strip()
        if bare.upper() == old.labels[old.gold].upper():
            label = new.labels[new.gold]
            return value.replace(bare, label.lower() if bare.islower() else label)
        if bare == old.options[old.gold].strip():
            return new.options[new.gold]
        if bare.isdigit() and int(bare) - old.gold in (0, 1):
            return value.replace(bare, str(int(bare) - old.gold + new.gold))
    raise ValueError(f"{value!r} does not denote option {old.gold}")


def possible_layouts(
    documents: Sequence[Document], golds: Sequence[int], fields: Mapping[str, str]
) -> Iterator[Layout]:
    """Yield the layouts that fit all `documents`, the likeliest first; `fields` (--fields) sets some or all names."""
    first = documents[0]
    if any(name not in first for names in fields.values() for name in names.split("|")):
        fields = {}  # they belong to another task
    letter_columns = tuple(letter for letter in LETTERS if letter in first)
    options: list[tuple[str, ...]] = [(name,) for name in OPTION_FIELDS if name in first]
    if len(letter_columns) > 1 and letter_columns == tuple(LETTERS[: len(letter_columns)]):
        options.append(letter_columns)
    if "options" in fields:
        options = [tuple(fields["options"].split("|"))]
    for question in [fields["question"]] if "question" in fields else QUESTION_FIELDS:
        for answer in [fields["answer"]] if "answer" in fields else ANSWER_FIELDS:
            for held in options:
                layout = Layout(question, held, answer)
                if all(layout.understands(one, gold) for one, gold in zip(documents, golds, strict=True)):
                    yield layout


def parse_fields(text: str | None) -> dict[str, str]:
    """Parse `question=q,options=o1|o2|o3,answer=a`; any of the three may be omitted."""
    fields = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in ("question", "options", "answer") or not equals or not value:
            raise ConfigError(
                f"--fields {text}",
                f"{part.strip()!r} is none of question=NAME, options=NAME (or options=NAME|NAME|...), answer=NAME",
                "Set the field names of the task's documents in this format.",
            )
        fields[name] = value
    return fields
