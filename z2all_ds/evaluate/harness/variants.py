"""Reshaped copies of a harness task: the same prompt format, metrics and few-shot draws, but changed documents.

A variant is a shallow copy of the loaded task with reshaped documents (few-shot examples too, except under
`others_wrong`); for renamed letters the rendered prompt and the scored answers are changed instead. Each variant is
verified on the first documents: the prompt must show the options, and the harness must see the answer at its new
position. A later document that cannot be reshaped is asked unchanged, and counted.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from z2all_ds.evaluate.harness import questions
from z2all_ds.evaluate.harness.questions import LETTERS, OTHERS_WRONG, SHUFFLED, Document, Layout, Question
from z2all_ds.evaluate.harness.settings import HarnessSettings

CHECKED_DOCUMENTS = 16
"""Documents on which layouts and variants are verified; rendering a whole large benchmark again takes minutes."""


@dataclass
class Variants:
    """The reshaped copies of one task: `tasks[reshaping]`, several for `shuffled`; and why others are missing."""

    tasks: dict[str, list[Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unchanged: dict[str, int] = field(default_factory=dict)
    """Per available reshaping, the number of questions that it could not change: they are asked unchanged."""


def make_variants(task: Any, settings: HarnessSettings) -> Variants:
    """Return one copy of a loaded task for each of the reshapings (several copies for `shuffled`)."""
    if not settings.reshape:
        return Variants()
    if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input or task.multiple_target:
        return Variants(reasons=dict.fromkeys(settings.reshape, "not multiple choice with one right option"))
    documents = list(islice(task.eval_docs, settings.limit))
    checked = documents[:CHECKED_DOCUMENTS]
    layout, reason = _find_layout(task, checked, settings.field_names)
    if layout is None:
        return Variants(reasons=dict.fromkeys(settings.reshape, reason))
    scores_labels = all(_bare(task.doc_to_choice(one)) == _read(task, layout, one).labels for one in checked)
    seeds = [settings.seed * 1000 + number for number in range(settings.shuffles)]
    changes: dict[str, list[Callable[[Question], Question]]] = {
        OTHERS_WRONG: [partial(questions.with_others_wrong, wording=settings.others_wrong_text)],
        SHUFFLED: [partial(questions.shuffled, seed=seed) for seed in seeds],
    }
    variants = Variants()
    for name in settings.reshape:
        if name != SHUFFLED and not scores_labels:
            variants.reasons[name] = "the options' texts are scored, not their letters"
            continue
        if name == LETTERS:
            if not all(isinstance(_with_renamed_letters(task, layout, one), _Renamed) for one in checked):
                variants.reasons[name] = "the prompt does not put the letters before the options"
                continue
            variants.tasks[name] = [_with_letters(task, documents, layout)]
        else:
            variants.tasks[name] = [
                _with_documents(task, f"{name}{number or ''}", documents, layout, change, name == OTHERS_WRONG)
                for number, change in enumerate(changes[name])
            ]
        asked = variants.tasks[name][0].eval_docs
        variants.unchanged[name] = sum(new is old for new, old in zip(asked, documents, strict=True))
    return variants


def _find_layout(task: Any, documents: Sequence[Document], fields: Mapping[str, str]) -> tuple[Layout | None, str]:
    """Return the first layout that the harness follows when options are moved; else the reason why there is none."""
    reason = (
        f"question, options and answer not found among the fields {', '.join(documents[0])}; set them with --fields"
    )
    for layout in questions.possible_layouts(documents, [gold_of(task, one) for one in documents], fields):
        if not all(questions.shows_options(str(task.doc_to_text(one)), _read(task, layout, one)) for one in documents):
            reason = "the prompt does not show the options"
        elif not all(_is_followed(task, layout, one) for one in documents):
            reason = f"prompt and answer do not follow the fields {', '.join((*layout.options, layout.answer))}"
        else:
            return layout, ""
    return None, reason


def _is_followed(task: Any, layout: Layout, document: Document) -> bool:
    """Return whether the harness shows the options of a changed document, and sees the answer at its new position."""
    old = _read(task, layout, document)
    new = questions.shuffled(old, seed=0)
    written = layout.write(document, old, new)
    return gold_of(task, written) == new.gold and questions.shows_options(str(task.doc_to_text(written)), new)


def gold_of(task: Any, document: Document) -> int:
    """Return the index of the right option according to the harness; -1 if there is none."""
    gold, choices = task.doc_to_target(document), task.doc_to_choice(document)
    if isinstance(gold, str):
        return choices.index(gold) if gold in choices else -1
    return gold if isinstance(gold, int) and 0 <= gold < len(choices) else -1


def _read(task: Any, layout: Layout, document: Document) -> Question:
    return layout.read(document, gold_of(task, document))


def _copy(task: Any, suffix: str, documents: Sequence[Document], examples: Sequence[Document]) -> Any:
    """Return the task as `NAME@SUFFIX`, with its own documents and few-shot examples."""
    made = copy.copy(task)
    made._config = copy.copy(task.config)
    made._config.task = f"{task.config.task}@{suffix}"
    made._config.task_alias = None
    made._config.process_docs = None
    made._instances = None
    made.dataset = {task.config.test_split if task.has_test_docs() else task.config.validation_split: documents}
    if hasattr(task, "sampler"):
        made.sampler = copy.copy(task.sampler)  # separate: each draws the same examples from the same seed
        made.sampler.df = examples
    return made


def _examples(task: Any) -> Sequence[Document]:
    examples: Sequence[Document] = task.sampler.df if hasattr(task, "sampler") else []
    return examples


def _with_documents(
    task: Any,
    suffix: str,
    documents: Sequence[Document],
    layout: Layout,
    change: Callable[[Question], Question],
    plain_examples: bool,
) -> Any:
    """Return a copy of the task with changed documents; those that cannot be read stay unchanged.

    `plain_examples`: the prompt shows unchanged examples. If their right option said that the others are wrong, the
    model would learn the phrase. They are still drawn from the changed ones, so that the harness recognizes and leaves
    out a question that is in its own pool of examples.
    """

    def changed(document: Document) -> Document:
        gold = gold_of(task, document)
        if not layout.fits(document, gold):
            return document
        old = layout.read(document, gold)
        return layout.write(document, old, change(old))

    examples = [changed(one) for one in _examples(task)]
    made = _copy(task, suffix, [changed(one) for one in documents], examples)
    if plain_examples and examples:
        plain = dict(zip(map(id, examples), _examples(task), strict=True))
        draw = made.sampler.sample
        made.sampler.sample = lambda *arguments, **named: [plain.get(id(one), one) for one in draw(*arguments, **named)]
    return made


# Renamed letters: the documents are unchanged, their rendering is changed


def _bare(choices: Sequence[str]) -> tuple[str, ...]:
    return tuple(choice.strip(" ().、（）") for choice in choices)


class _Renamed(dict[str, Any]):
    """A document together with its rendering for the harness."""

    prompt: str
    choices: list[str]
    target: Any


def _with_renamed_letters(
    task: Any, layout: Layout, document: Document, text: Any = None, choice: Any = None, target: Any = None
) -> Document:
    """Return the document with its letters renamed; the document itself if that is not possible everywhere.

    `text`, `choice` and `target` are templates if few-shot examples have different ones from the task.
    """
    gold = gold_of(task, document)
    if not layout.fits(document, gold):
        return document
    question = layout.read(document, gold)
    choices = task.doc_to_choice(document, choice)
    labels = questions.with_chinese_labels(question).labels
    prompt = questions.relabel_prompt(str(task.doc_to_text(document, text)), question, labels)
    if prompt is None or _bare(choices) != question.labels:
        return document
    names = dict(zip(question.labels, labels, strict=True))

    def renamed(choice: str) -> str:
        (bare,) = _bare([choice])
        return choice.replace(bare, names[bare]) if bare in names else choice

    made = _Renamed(document)
    made.prompt, made.choices = prompt, [renamed(one) for one in choices]
    made.target = task.doc_to_target(document, target)
    if isinstance(made.target, str):
        made.target = renamed(made.target)
    return made


def _with_letters(task: Any, documents: Sequence[Document], layout: Layout) -> Any:
    """Return a copy of the task that renames the letters in the rendering of the loaded one."""
    shown = task.fewshot_cfg
    templates = (shown.doc_to_text, shown.doc_to_choice, shown.doc_to_target)
    examples = [_with_renamed_letters(task, layout, one, *templates) for one in _examples(task)]
    made = _copy(task, LETTERS, [_with_renamed_letters(task, layout, one) for one in documents], examples)
    plain = _copy(task, LETTERS, documents, _examples(task))

    def rendered(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def render(document: Document, template: Any = None) -> Any:
            return getattr(document, part) if isinstance(document, _Renamed) else original(document, template)

        return render

    def fewshot_context(document: Document, *arguments: Any, **named: Any) -> Any:
        if isinstance(document, _Renamed):
            return type(task).fewshot_context(made, document, *arguments, **named)
        if hasattr(made, "sampler"):
            plain.sampler.rnd = made.sampler.rnd  # this draw counts: the next question gets its own examples again
        return plain.fewshot_context(document, *arguments, **named)  # description and examples unchanged, too

    made.doc_to_text = rendered("prompt", task.doc_to_text)
    made.doc_to_choice = rendered("choices", task.doc_to_choice)
    made.doc_to_target = rendered("target", task.doc_to_target)
    made.fewshot_context = fewshot_context
    if isinstance(task.config.description, str) and "{{" not in task.config.description:
        question = _read(task, layout, documents[0])
        labels = questions.with_chinese_labels(question).labels
        made._config.description = questions.relabel_lists(task.config.description, question.labels, labels)
    return made
