"""Tests for reshaped copies of tasks: exact prompts, answers and few-shot examples, and reasons for missing copies."""

from typing import Any

import pytest

from tests.helpers.memorised import en_school_with_an_odd_question, load
from z2all_ds.evaluate.harness.questions import RESHAPINGS
from z2all_ds.evaluate.harness.settings import HarnessSettings
from z2all_ds.evaluate.harness.variants import Variants, gold_of, make_variants

FIELDS = "question=frage,options=o1|o2|o3,answer=loesung"


def variants_of(task: Any, fields: str | None = None, shuffles: int = 2, limit: int | None = None) -> Variants:
    settings = HarnessSettings((), reshape=RESHAPINGS, seed=1, shuffles=shuffles, fields=fields, limit=limit)
    return make_variants(task, settings)


def built(task: Any, shots: int) -> list[tuple[str, list[str]]]:
    """Return (prompt, scored answers) of every question, as the harness builds them."""
    task.set_config(key="num_fewshot", value=shots)
    task.set_fewshot_seed(seed=1)
    task.build_all_requests()
    questions: dict[int, list[Any]] = {}
    for instance in task.instances:
        questions.setdefault(instance.doc_id, []).append(instance.args)
    return [(arguments[0][0], [answer for _, answer in arguments]) for arguments in questions.values()]


def test_letters_are_renamed_in_prompt_examples_and_answers() -> None:
    task = load("zh_school")["tasks"]["zh_school"]
    (renamed,) = variants_of(task).tasks["letters"]
    prompt, answers = built(renamed, shots=1)[0]
    assert prompt == (
        "地球绕着什么转？\n一. 月亮\n二. 太阳\n三. 火星\n四. 北极星\n答案： 二\n\n"
        "水在标准大气压下的沸点是多少摄氏度？\n一. 九十\n二. 一百\n三. 一百一十\n四. 一百二十\n答案："
    )
    assert answers == [" 一", " 二", " 三", " 四"]
    assert [gold_of(renamed, one) for one in renamed.eval_docs] == [gold_of(task, one) for one in task.eval_docs]
    plain_prompt, plain_answers = built(task, shots=1)[0]
    assert "\nB. 太阳" in plain_prompt and plain_answers == [" A", " B", " C", " D"], "the task itself is left alone"


def test_letters_listed_in_a_description_are_renamed() -> None:
    (renamed,) = variants_of(load("en_school")["tasks"]["en_school"]).tasks["letters"]
    assert built(renamed, shots=0)[0][0] == (
        "Answer with 一, 二 or 三.\n\nWhich animal barks?\n一) dog\n二) cow\n三) hen\nAnswer:"
    )


def test_a_question_whose_letters_cannot_be_renamed_is_asked_unchanged() -> None:
    task = en_school_with_an_odd_question()["tasks"]["en_school"]
    variants = variants_of(task, shuffles=1)
    assert variants.unchanged == {"letters": 1, "others_wrong": 0, "shuffled": 0}
    *before, (odd_prompt, odd_answers), (prompt, answers) = built(variants.tasks["letters"][0], shots=2)
    *_, odd_plain, (plain, _) = built(task, shots=2)
    assert (odd_prompt, odd_answers) == odd_plain, "description and examples, too"
    assert odd_answers == [" A", " B", " C"] and "A) two words" in odd_prompt
    assert all(answers == [" 一", " 二", " 三"] for _, answers in (*before, (prompt, answers)))
    questions = [line for line in prompt.splitlines() if line.endswith("?")]
    assert questions == [line for line in plain.splitlines() if line.endswith("?")], "the examples that it has plainly"


def test_others_wrong_replaces_the_right_option_but_leaves_examples_unchanged() -> None:
    (reshaped,) = variants_of(load("zh_school")["tasks"]["zh_school"]).tasks["others_wrong"]
    prompt, answers = built(reshaped, shots=1)[0]
    assert prompt == (
        "地球绕着什么转？\nA. 月亮\nB. 太阳\nC. 火星\nD. 北极星\n答案： B\n\n"
        "水在标准大气压下的沸点是多少摄氏度？\nA. 九十\nB. 其他答案全错\nC. 一百一十\nD. 一百二十\n答案："
    )
    assert answers == [" A", " B", " C", " D"]


def test_a_question_is_never_its_own_example() -> None:
    task = en_school_with_an_odd_question()["tasks"]["en_school"]
    (reshaped,) = variants_of(task).tasks["others_wrong"]
    others = len(task.eval_docs) - 1
    for (prompt, _), document in zip(built(reshaped, others), task.eval_docs, strict=True):
        assert prompt.count("?\n") == others + 1 and prompt.count(document["question"]) == 1
        assert prompt.count("all other answers are wrong") == 1


@pytest.mark.parametrize(("name", "fields"), [("zh_school", None), ("en_school", None), ("odd_fields", FIELDS)])
def test_the_right_answer_follows_its_shuffled_option(name: str, fields: str | None) -> None:
    task = load(name)["tasks"][name]
    first, second = variants_of(task, fields).tasks["shuffled"]
    letters = "ABCD"[: len(task.doc_to_choice(task.eval_docs[0]))]

    def right_text(one: Any, document: Any) -> str:
        lines = one.doc_to_text(document).splitlines()[-len(letters) - 1 : -1]
        text: str = lines[gold_of(one, document)]
        return text[2:].strip()

    for plain, *shuffles in zip(task.eval_docs, first.eval_docs, second.eval_docs, strict=True):
        for one, moved in zip((first, second), shuffles, strict=True):
            assert right_text(one, moved) == right_text(task, plain)
            assert one.doc_to_text(moved) != task.doc_to_text(plain)
    assert [first.doc_to_text(one) for one in first.eval_docs] != [second.doc_to_text(one) for one in second.eval_docs]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("science", "does not show the options"),
        ("odd_fields", "among the fields frage, o1, o2, o3, loesung; set them with --fields"),
        ("sums", "not multiple choice"),
    ],
)
def test_tasks_that_cannot_be_reshaped_give_a_reason(name: str, reason: str) -> None:
    variants = variants_of(load(name)["tasks"][name])
    assert variants.tasks == {}
    assert set(variants.reasons) == set(RESHAPINGS)
    assert all(reason in found for found in variants.reasons.values())


def test_tasks_that_score_option_texts_are_only_shuffled() -> None:
    variants = variants_of(load("science_shown")["tasks"]["science_shown"])
    assert set(variants.tasks) == {"shuffled"}
    assert set(variants.reasons) == {"letters", "others_wrong"}
    assert "texts are scored" in variants.reasons["letters"]


def test_a_task_whose_target_is_not_the_answer_field_is_not_shuffled() -> None:
    task = load("en_school")["tasks"]["en_school"]
    task._config.doc_to_target = "{{answer if id is not defined else id}}"
    task.dataset = {"test": [{**one, "id": one["answer"]} for one in task.eval_docs]}
    assert "do not follow the fields choices, answer" in variants_of(task).reasons["shuffled"]


def test_the_limit_applies_to_reshaped_tasks() -> None:
    variants = variants_of(load("en_school")["tasks"]["en_school"], shuffles=1, limit=5)
    assert len(variants.tasks["shuffled"][0].eval_docs) == 5
