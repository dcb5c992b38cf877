"""Reshaped multiple-choice questions, to distinguish a model that knows the answer from one that memorized the letter.

A memorized question is answered by its letter. A model that knows the subject also answers when the letters are
一二三四, when the options are in another order, and when the right option says that the others are wrong. Random
choices depend on the question's text and the seed, not on its position in the file, so that a question is reshaped
alike wherever it occurs (few-shot examples too).
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

LETTERS = "letters"
OTHERS_WRONG = "others_wrong"
SHUFFLED = "shuffled"
RESHAPINGS = (LETTERS, OTHERS_WRONG, SHUFFLED)

CHINESE_NUMERALS = tuple("一二三四五六七八九十") + tuple(f"十{digit}" for digit in "一二三四五六七八九") + ("二十",)
OTHERS_WRONG_CHINESE = "其他答案全错"
OTHERS_WRONG_ENGLISH = "all other answers are wrong"

_CJK = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
_AFTER_LABEL = r"[\s.．、。:：,，)）\]】>]{1,4}"
_BETWEEN_LABELS = r"(?:\W|or|and|或|和|或者){1,6}?"


@dataclass(frozen=True)
class Question:
    """One multiple-choice question. `gold` is the index of the right option, from 0."""

    text: str
    options: tuple[str, ...]
    gold: int
    labels: tuple[str, ...]


def has_chinese(text: str) -> bool:
    return _CJK.search(text) is not None


def with_chinese_labels(question: Question) -> Question:
    """Replace A B C D by 一 二 三 四; the options keep their positions."""
    return replace(question, labels=CHINESE_NUMERALS[: len(question.labels)])


def with_others_wrong(question: Question, wording: str | None = None) -> Question:
    """Make the right option say that the others are wrong, in the question's language unless `wording` is given."""
    if wording is None:
        wording = OTHERS_WRONG_CHINESE if has_chinese(question.text) else OTHERS_WRONG_ENGLISH
    options = list(question.options)
    options[question.gold] = wording
    return replace(question, options=tuple(options))


def shuffled(question: Question, seed: int) -> Question:
    """Return the options in another order (never the old one, unless there is only one); labels stay in place."""
    count = len(question.options)
    if count < 2:
        return question
    identity = list(range(count))
    order = list(identity)
    generator = random.Random(_number_of(question, seed))
    while order == identity:
        generator.shuffle(order)
    options = tuple(question.options[old] for old in order)
    return replace(question, options=options, gold=order.index(question.gold))


def _number_of(question: Question, seed: int) -> int:
    """Return a number derived from the question's text and options, the same in every process."""
    parts = "\x00".join((str(seed), question.text, *question.options))
    return int.from_bytes(hashlib.sha256(parts.encode()).digest()[:8], "big")


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
