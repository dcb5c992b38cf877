"""Multiple-choice questions: read from a benchmark's documents, reshaped, and written back.

A memorized question is answered by its letter. A model that knows the subject also answers when the letters are
一二三四, when the options are in another order, and when the right option says that the others are wrong. Random
choices depend on the question's text and the seed, not on its position in the file, so that a question is reshaped
alike wherever it occurs (few-shot examples too).

These document layouts are detected: `choices: {text, label}` with `answerKey` (ARC), a list of options with an answer
(MMLU), and one column per letter with an answer (C-Eval, CMMLU). Others are set with --fields. The harness decides
which option is right, so an answer may be a number from 0 or from 1, a letter or the option's own text.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

LETTERS, OTHERS_WRONG, SHUFFLED = RESHAPINGS = ("letters", "others_wrong", "shuffled")

LATIN_LABELS = tuple("ABCDEFGHIJKLMNOPQRST")
CHINESE_LABELS = (*"一二三四五六七八九十", *(f"十{digit}" for digit in "一二三四五六七八九"), "二十")
OTHERS_WRONG_CHINESE = "其他答案全错"
OTHERS_WRONG_ENGLISH = "all other answers are wrong"

QUESTION_FIELDS = ("question", "Question", "question_stem", "query", "text", "prompt", "input", "ctx")
OPTION_FIELDS = ("choices", "options", "endings", "Choices", "Options")
ANSWER_FIELDS = ("answer", "Answer", "answerKey", "answer_key", "gold", "label", "target", "answer_index")

_CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_AFTER_LABEL = r"[\s.．、。:：,，)）\]】>]{1,4}"
_BETWEEN_LABELS = r"(?:\W|or|and|或|和|或者){1,6}?"

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One multiple-choice question. `gold` is the index of the right option, from 0."""

    text: str
    options: tuple[str, ...]
    gold: int
    labels: tuple[str, ...]


# Reshaping


def with_chinese_labels(question: Question) -> Question:
    """Replace A B C D by 一 二 三 四; the options keep their positions."""
    return replace(question, labels=CHINESE_LABELS[: len(question.labels)])


def with_others_wrong(question: Question, wording: str | None = None) -> Question:
    """Make the right option say that the others are wrong, in the question's language unless `wording` is given."""
    if wording is None:
        wording = OTHERS_WRONG_CHINESE if _CJK.search(question.text) else OTHERS_WRONG_ENGLISH
    before, after = question.options[: question.gold], question.options[question.gold + 1 :]
    return replace(question, options=(*before, wording, *after))


def shuffled(question: Question, seed: int) -> Question:
    """Return the options in another order (never the old one, unless there is only one); labels keep their order."""
    if len(question.options) < 2:
        return question
    parts = "\x00".join((str(seed), question.text, *question.options))
    generator = random.Random(int.from_bytes(hashlib.sha256(parts.encode()).digest()[:8], "big"))
    identity = list(range(len(question.options)))
    order = list(identity)
    while order == identity:
        generator.shuffle(order)
    options = tuple(question.options[old] for old in order)
    return replace(question, options=options, gold=order.index(question.gold))


def shows_options(prompt: str, question: Question) -> bool:
    """Return whether the prompt contains the text of every option."""
    return all(option.strip() in prompt for option in question.options)


def relabel_prompt(prompt: str, question: Question, new_labels: Sequence[str]) -> str | None:
    """Return the prompt with its option labels renamed; None if a label does not precede its option.

    Only a label directly before its own option is renamed, and around the question a list of all labels ("A, B, C or
    D"): a letter that is part of the question (vitamin A, the points A, B and C) is not changed.
    """
    markers = []
    for label, option in zip(question.labels, question.options, strict=True):
        pattern = rf"(?<![A-Za-z0-9]){re.escape(label)}(?={_AFTER_LABEL}{re.escape(option.strip())})"
        found = list(re.finditer(pattern, prompt))
        if not found:
            return None
        markers.append(found[-1])  # options come after the question, which may contain the same words
    names = dict(zip(question.labels, new_labels, strict=True))
    renamed, done = [], 0
    for marker in sorted(markers, key=lambda found: found.start()):
        renamed += [prompt[done : marker.start()], names[marker.group()]]
        done = marker.end()
    whole, own_words = "".join(renamed) + prompt[done:], question.text.strip()
    around = whole.split(own_words, maxsplit=1) if own_words else [whole]
    return own_words.join(relabel_lists(part, question.labels, new_labels) for part in around)


def relabel_lists(text: str, labels: Sequence[str], new_labels: Sequence[str]) -> str:
    """Rename only lists of all labels in order ("A, B, C or D", "A/B/C/D")."""
    if len(labels) < 2:
        return text
    pattern = rf"(?<![A-Za-z0-9]){f'({_BETWEEN_LABELS})'.join(map(re.escape, labels))}(?![A-Za-z0-9])"

    def rename(found: re.Match[str]) -> str:
        between = [*found.groups(), ""]
        return "".join(name + gap for name, gap in zip(new_labels, between, strict=True))

    return re.sub(pattern, rename, text)


# Documents


@dataclass(frozen=True)
class Layout:
    """Names of a document's fields. `options`: one field with all options, or one field per option."""

    question: str
    options: tuple[str, ...]
    answer: str

    def read(self, document: Document, gold: int) -> Question:
        """Return the question; `gold` is the index of the right option according to the harness."""
        options, held = self._options(document), document[self.options[0]]
        has_labels = isinstance(held, Mapping) and "label" in held
        labels = tuple(map(str, held["label"])) if has_labels else LATIN_LABELS[: len(options)]
        return Question(str(document[self.question]), options, gold, labels)

    def write(self, document: Document, old: Question, new: Question) -> dict[str, Any]:
        """Return the document with the options and the answer of `new` in its original format."""
        written = dict(document)
        if len(self.options) > 1:
            written.update(zip(self.options, new.options, strict=True))
        elif isinstance(document[self.options[0]], Mapping):
            written[self.options[0]] = {**document[self.options[0]], "text": list(new.options)}
        else:
            written[self.options[0]] = list(new.options)
        written[self.answer] = _encode_answer(document[self.answer], old, new)
        return written

    def fits(self, document: Document, gold: int) -> bool:
        """Return whether all fields exist, the right option is one of the options, and the answer can be written."""
        try:
            question = self.read(document, gold)
            _encode_answer(document[self.answer], question, question)
        except (LookupError, TypeError, ValueError):
            return False
        return 0 <= gold < len(question.options) == len(question.labels) <= len(LATIN_LABELS)

    def _options(self, document: Document) -> tuple[str, ...]:
        if len(self.options) > 1:
            return tuple(str(document[name]) for name in self.options)
        held = document[self.options[0]]
        texts = held["text"] if isinstance(held, Mapping) else held
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise TypeError(f"{self.options[0]} is not a list")
        return tuple(str(text) for text in texts)


def _encode_answer(value: Any, old: Question, new: Question) -> Any:
    """Return the answer `new.gold` in the format in which `value` states `old.gold`; ValueError if it is unknown."""
    if isinstance(value, list) and len(value) == 1:
        return [_encode_answer(value[0], old, new)]
    if isinstance(value, int) and not isinstance(value, bool) and value - old.gold in (0, 1):
        return value - old.gold + new.gold
    if isinstance(value, str):
        bare = value.strip()
        if bare.upper() == old.labels[old.gold].upper():
            label = new.labels[new.gold]
            return value.replace(bare, label.lower() if bare.islower() else label)
        if bare == old.options[old.gold].strip():
            return new.options[new.gold]
        if bare.isdecimal() and int(bare) - old.gold in (0, 1):
            return value.replace(bare, str(int(bare) - old.gold + new.gold))
    raise ValueError(f"{value!r} does not denote option {old.gold}")


def possible_layouts(
    documents: Sequence[Document], golds: Sequence[int], fields: Mapping[str, str]
) -> Iterator[Layout]:
    """Yield the layouts that fit all `documents`, the likeliest first; `fields` (--fields) sets some or all names."""
    first = documents[0]
    if any(name not in first for names in fields.values() for name in names.split("|")):
        fields = {}  # they belong to another task
    columns = tuple(letter for letter in LATIN_LABELS if letter in first)
    options: list[tuple[str, ...]] = [(name,) for name in OPTION_FIELDS if name in first]
    if len(columns) > 1 and columns == LATIN_LABELS[: len(columns)]:
        options.append(columns)
    if "options" in fields:
        options = [tuple(fields["options"].split("|"))]
    for question in [fields["question"]] if "question" in fields else QUESTION_FIELDS:
        for answer in [fields["answer"]] if "answer" in fields else ANSWER_FIELDS:
            for held in options:
                layout = Layout(question, held, answer)
                if all(layout.fits(one, gold) for one, gold in zip(documents, golds, strict=True)):
                    yield layout
