"""A harness task with its questions reshaped: the same prompt's form, metrics and few-shot draws, other documents.

A variant is a shallow copy of the loaded task that holds reshaped documents (few-shot examples too); for renamed
letters the rendered prompt and the scored answers are changed instead. What a variant promises is looked at on the
first documents: that the prompt shows the options, and that the harness sees the answer where we have put it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from z2all_ds.evaluate import reshaping
from z2all_ds.evaluate.harness_layouts import Document, Layout, possible_layouts
from z2all_ds.evaluate.reshaping import LETTERS, OTHERS_WRONG, SHUFFLED, Question

LOOKED_AT = 16
"""Documents on which layout and variants are tried out; rendering all of a large benchmark once more takes minutes."""


@dataclass
class Variants:
    """The reshaped copies of one task: `tasks[reshaping]`, several for `shuffled`; and why others are not there."""

    tasks: dict[str, list[Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def make_variants(
    task: Any,
    wanted: Sequence[str],
    seed: int,
    shuffles: int,
    fields: Mapping[str, str],
    others_wrong_text: str | None,
    limit: int | None,
) -> Variants:
    """Of a loaded task, one copy for each of the reshapings (`shuffles` copies for `shuffled`)."""
    if not wanted:
        return Variants()
    if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input or task.multiple_target:
        return Variants(reasons=dict.fromkeys(wanted, "no multiple choice with one right option"))
    documents = list(islice(task.eval_docs, limit))
    looked_at = documents[:LOOKED_AT]
    layout, reason = _layout_of(task, looked_at, fields)
    if layout is None:
        return Variants(reasons=dict.fromkeys(wanted, reason))
    labels_reason = _why_not_by_labels(task, layout, looked_at)
    changes: dict[str, list[Callable[[Question], Question]]] = {
        OTHERS_WRONG: [partial(reshaping.with_others_wrong, wording=others_wrong_text)],
        SHUFFLED: [partial(reshaping.shuffled, seed=seed * 1000 + number) for number in range(shuffles)],
    }
    variants = Variants()
    for name in wanted:
        if labels_reason and name in (LETTERS, OTHERS_WRONG):
            variants.reasons[name] = labels_reason
        elif name != LETTERS:
            variants.tasks[name] = [
                _with_documents(task, documents, layout, change, f"{task.config.task}@{name}{number or ''}")
                for number, change in enumerate(changes[name])
            ]
        elif any(_relabelled(task, layout, one) is None for one in looked_at):
            variants.reasons[name] = "the prompt does not put the letters before the options"
        else:
            variants.tasks[name] = [_with_letters(task, layout)]
    return variants


def _layout_of(task: Any, documents: Sequence[Document], fields: Mapping[str, str]) -> tuple[Layout | None, str]:
    """The first layout that the harness follows when options are moved; else why there is none."""
    reason = (
        f"question, options and answer not found among the fields {', '.join(documents[0])}; name them with --fields"
    )
    for layout in possible_layouts(documents, [gold_of(task, one) for one in documents], fields):
        if not all(reshaping.shows_options(str(task.doc_to_text(one)), _read(task, layout, one)) for one in documents):
            reason = "the prompt does not show the options"
        elif not all(_is_followed(task, layout, one) for one in documents):
            reason = f"prompt and answer do not follow the fields {', '.join((*layout.options, layout.answer))}"
        else:
            return layout, ""
    return None, reason


def _is_followed(task: Any, layout: Layout, document: Document) -> bool:
    """Whether the harness shows the options of a document that we have changed, and sees the answer where we put it."""
    old = _read(task, layout, document)
    new = reshaping.shuffled(old, seed=0)
    written = layout.write(document, old, new)
    return gold_of(task, written) == new.gold and reshaping.shows_options(str(task.doc_to_text(written)), new)


def gold_of(task: Any, document: Document) -> int:
    """Number of the right option as the harness sees it; -1 where it sees none."""
    gold, choices = task.doc_to_target(document), task.doc_to_choice(document)
    if isinstance(gold, str):
        return choices.index(gold) if gold in choices else -1
    return gold if isinstance(gold, int) and 0 <= gold < len(choices) else -1


def _read(task: Any, layout: Layout, document: Document) -> Question:
    return layout.read(document, gold_of(task, document))


def _copy(task: Any, name: str) -> Any:
    made = copy.copy(task)
    made._config = copy.copy(task.config)
    made._config.task = name
    made._config.task_alias = None
    made._instances = None
    if hasattr(task, "sampler"):
        made.sampler = copy.copy(task.sampler)  # of its own: each draws the same examples from the same seed
    return made


def _with_documents(
    task: Any, documents: Sequence[Document], layout: Layout, change: Callable[[Question], Question], name: str
) -> Any:
    """A copy of the task that holds changed documents; those that cannot be read stay as they are."""

    def changed(document: Document) -> Document:
        gold = gold_of(task, document)
        if not layout.understands(document, gold):
            return document
        old = layout.read(document, gold)
        return layout.write(document, old, change(old))

    made = _copy(task, name)
    split = task.config.test_split if task.has_test_docs() else task.config.validation_split
    made.dataset = {split: [changed(one) for one in documents]}
    made._config.process_docs = None
    if hasattr(task, "sampler"):
        made.sampler.df = [changed(one) for one in task.sampler.df]
    return made


# Renamed letters: the documents stay, what is rendered from them changes


def _why_not_by_labels(task: Any, layout: Layout, documents: Sequence[Document]) -> str:
    """Texts that are scored themselves have no letters to rename, and another wording has another length."""
    for document in documents:
        if _bare(task.doc_to_choice(document)) != _read(task, layout, document).labels:
            return "the options' texts are scored, not their letters"
    return ""


def _relabelled(task: Any, layout: Layout, document: Document) -> str | None:
    question = _read(task, layout, document)
    labels = reshaping.with_chinese_labels(question).labels
    return reshaping.relabel_prompt(str(task.doc_to_text(document)), question, labels)


def _bare(choices: Sequence[str]) -> tuple[str, ...]:
    return tuple(choice.strip(" ().、（）") for choice in choices)


def _with_letters(task: Any, layout: Layout) -> Any:
    """A copy of the task that renames the letters in what the loaded one renders."""
    made = _copy(task, f"{task.config.task}@{LETTERS}")

    def names_of(document: Document) -> tuple[Question, dict[str, str]]:
        question = _read(task, layout, document)
        return question, dict(zip(question.labels, reshaping.with_chinese_labels(question).labels, strict=True))

    def renamed(choice: str, names: Mapping[str, str]) -> str:
        (bare,) = _bare([choice])
        return choice.replace(bare, names[bare]) if bare in names else choice

    def doc_to_text(document: Document, doc_to_text: Any = None) -> str:
        text = str(task.doc_to_text(document, doc_to_text))
        question, names = names_of(document)
        return reshaping.relabel_prompt(text, question, tuple(names.values())) or text

    def doc_to_choice(document: Document, doc_to_choice: Any = None) -> list[str]:
        _, names = names_of(document)
        return [renamed(choice, names) for choice in task.doc_to_choice(document, doc_to_choice)]

    def doc_to_target(document: Document, doc_to_target: Any = None) -> Any:
        target = task.doc_to_target(document, doc_to_target)
        return renamed(target, names_of(document)[1]) if isinstance(target, str) else target

    made.doc_to_text, made.doc_to_choice, made.doc_to_target = doc_to_text, doc_to_choice, doc_to_target
    if isinstance(task.config.description, str) and "{{" not in task.config.description:
        question, names = names_of(task.eval_docs[0])
        made._config.description = reshaping.relabel_lists(
            task.config.description, question.labels, tuple(names.values())
        )
    return made
