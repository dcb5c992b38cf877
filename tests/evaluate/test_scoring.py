"""Tests for scores, compared with plain transformers: one text at a time, explicit softmax."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.probe_files import write_probes
from z2all_ds.base.errors import DataError
from z2all_ds.base.reports import Table
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.evaluate.probe_report import ProbeResults, content_of, describe
from z2all_ds.evaluate.probe_runs import PlainTokenizer, ask_model
from z2all_ds.evaluate.probes import SentenceProbe, load_probes
from z2all_ds.evaluate.scoring import score
from z2all_ds.evaluate.windows import Window


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return load_model(model_folder, dtype="fp32", device=torch.device("cpu"))


class Golden:
    """Reference values computed with transformers only."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def log_probabilities(self, prompt: str, text: str) -> list[float]:
        prompt_ids, ids = self.ids(prompt) if prompt else [], self.ids(prompt + text)
        if ids[: len(prompt_ids)] != prompt_ids:
            ids = prompt_ids + self.ids(text)
        probabilities = torch.softmax(self.model(torch.tensor([ids])).logits[0].double(), dim=-1)
        return [math.log(probabilities[at - 1, ids[at]]) for at in range(max(1, len(prompt_ids)), len(ids))]

    def probability(self, prompt: str, *texts: str) -> float:
        return sum(math.exp(sum(self.log_probabilities(prompt, text))) for text in texts)


def test_every_kind_of_probe_equals_plain_transformers(loaded: LoadedModel, model_folder: Path, tmp_path: Path) -> None:
    golden = Golden(model_folder)
    probes = load_probes(str(write_probes(tmp_path)))
    answers = ask_model(loaded, probes, batch=4).answers
    plain = golden.log_probabilities("", "The house is old.")
    order = [sum(golden.log_probabilities("", text)) for text in ("他来了", "了他来")]
    per_byte = [
        sum(golden.log_probabilities("She ", text)) / len(text.encode()) for text in ("goes home", "home goes so")
    ]
    brace, both = golden.ids("以json输出{"), golden.ids("以json输出{}")
    contained = both[: len(brace)] == brace  # otherwise one token covers `{}`, which is then a separate answer
    expected = {
        "首都": golden.probability("中国的首都是", "北京", "上海"),
        "sum/of$odd": golden.probability("1 + 1 =", " 2"),
        "plain": math.exp(-sum(plain) / len(plain)),
        "order": order[0] - order[1],
        "bytes": per_byte[0] - per_byte[1],
        "json": golden.probability("以json输出", "{", "[", *(() if contained else ("{}",))),
        "silent": golden.probability("ab", "c"),
    }
    assert {name: answer.value for name, answer in answers.items()} == pytest.approx(expected, rel=1e-4)
    first_token = golden.tokenizer.decode(golden.ids("The house is old.")[:1])
    counted_bytes = len(b"The house is old.") - len(first_token)
    bits = -sum(plain) / math.log(2) / counted_bytes
    assert answers["plain"].details["bits_per_byte"] == pytest.approx(bits, rel=1e-4)


def test_values_do_not_depend_on_the_batch(loaded: LoadedModel) -> None:
    windows = [
        Window(range(3, 3 + length), [number > length % 2 for number in range(length)]) for length in (9, 3, 30, 4, 12)
    ]
    alone = dict(score(loaded, windows, batch=1))
    assert [len(alone[number]) for number in range(5)] == [sum(window.counted) for window in windows]
    for size in (2, 5, 100):
        together = dict(score(loaded, windows, batch=size))
        for number, losses in alone.items():
            assert losses.tolist() == pytest.approx(together[number].tolist(), rel=1e-4)


def test_too_long_texts_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(DataError, match=r"probe long: has .* tokens, but a sequence holds 48"):
        ask_model(loaded, [SentenceProbe(name="long", text="天地玄黄" * 40)], batch=4)


def test_too_long_probes_are_left_out_and_named_in_the_table(loaded: LoadedModel) -> None:
    short, long = SentenceProbe(name="short", text="天地玄黄"), SentenceProbe(name="long", text="天地玄黄" * 40)
    tokens = len(PlainTokenizer(loaded.tokenizer).encode(long.text))
    answers = ask_model(loaded, [long, short], batch=4)
    assert (list(answers.answers), answers.too_long) == (["short"], {"long": tokens})
    assert answers.answers == ask_model(loaded, [short], batch=4).answers
    table, *_ = describe(ProbeResults("f", [long, short], [[answers]]))
    assert isinstance(table, Table)
    skipped, measured = table.rows
    assert skipped == ["long", "sentence", "", f"skipped: has {tokens} tokens, too many for this model"]
    assert (measured[0], len(measured)) == ("short", len(table.columns))
    (row,) = content_of(ProbeResults("f", [long, short], [[answers]]))[0]["rows"]
    assert (list(row["values"]), row["too_long"]) == (["short"], {"long": tokens})
