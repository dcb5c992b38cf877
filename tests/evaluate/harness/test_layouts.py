"""Tests for layouts of documents: questions are read, changed and written back in the original format."""

from typing import Any

import pytest

from z2all_ds.base.errors import ConfigError
from z2all_ds.evaluate.harness.questions import Layout, Question, possible_layouts, shuffled
from z2all_ds.evaluate.harness.settings import HarnessSettings

MMLU = {"question": "2+2?", "choices": ["3", "4", "5"], "answer": 1, "subject": "sums"}
CEVAL = {"id": 7, "question": "二加二？", "A": "三", "B": "四", "C": "五", "D": "六", "answer": "B"}
CMMLU = {"Question": "二加二？", "A": "三", "B": "四", "C": "五", "D": "六", "Answer": "B"}
ARC = {"question": "2+2?", "choices": {"text": ["3", "4", "5"], "label": ["1", "2", "3"]}, "answerKey": "2"}


@pytest.mark.parametrize(
    ("document", "layout"),
    [
        (MMLU, Layout("question", ("choices",), "answer")),
        (CEVAL, Layout("question", ("A", "B", "C", "D"), "answer")),
        (CMMLU, Layout("Question", ("A", "B", "C", "D"), "Answer")),
        (ARC, Layout("question", ("choices",), "answerKey")),
    ],
)
def test_known_benchmarks_are_recognised_and_written_back(document: dict[str, Any], layout: Layout) -> None:
    assert next(possible_layouts([document], [1], {})) == layout
    old = layout.read(document, 1)
    assert old.options[old.gold] in ("4", "四")
    assert layout.write(document, old, old) == document
    new = shuffled(old, seed=3)
    written = layout.write(document, old, new)
    assert layout.read(written, new.gold) == new
    assert written.keys() == document.keys() and written != document
    assert document[layout.answer] in (1, "B", "2"), "the document itself is unchanged"


def test_labels_of_the_document_are_kept() -> None:
    assert Layout("question", ("choices",), "answerKey").read(ARC, 1).labels == ("1", "2", "3")
    assert Layout("question", ("choices",), "answer").read(MMLU, 1).labels == ("A", "B", "C")


@pytest.mark.parametrize(
    ("answer", "moved"),
    [(1, 2), (2, 3), ("1", "2"), ("2", "3"), ("B", "C"), ("b", "c"), (" B", " C"), ([1], [2]), ("y", "y")],
)
def test_the_answer_keeps_its_format(answer: Any, moved: Any) -> None:
    layout = Layout("q", ("o",), "a")
    document = {"q": "?", "o": ["x", "y", "z"], "a": answer}
    assert layout.fits(document, 1)
    old = layout.read(document, 1)
    assert layout.write(document, old, Question("?", ("x", "z", "y"), 2, old.labels))["a"] == moved


@pytest.mark.parametrize("answer", [0, 3, "C", "z", None, True, [1, 2], "7"])
def test_an_answer_that_does_not_denote_the_gold_option_does_not_fit(answer: Any) -> None:
    assert not Layout("q", ("o",), "a").fits({"q": "?", "o": ["x", "y", "z"], "a": answer}, 1)


@pytest.mark.parametrize("options", ["xyz", {"label": ["A"]}, 3, {"text": ["x", "y"], "label": ["A"]}])
def test_options_that_are_not_a_list_or_lack_labels_do_not_fit(options: Any) -> None:
    assert not Layout("q", ("o",), "a").fits({"q": "?", "o": options, "a": 1}, 1)


def test_fields_can_be_set_by_the_user() -> None:
    document = {"frage": "?", "o1": "x", "o2": "y", "loesung": "B"}
    assert list(possible_layouts([document], [1], {})) == []
    fields = HarnessSettings((), fields="question=frage, options=o1|o2,answer=loesung").field_names
    assert list(possible_layouts([document], [1], fields)) == [Layout("frage", ("o1", "o2"), "loesung")]
    assert next(possible_layouts([CEVAL], [1], fields)).answer == "answer", "fields of another task are ignored"


@pytest.mark.parametrize("text", ["frage", "title=frage", "question="])
def test_invalid_fields_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--fields"):
        HarnessSettings((), fields=text)
