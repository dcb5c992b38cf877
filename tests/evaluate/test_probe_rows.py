"""Tests for encoding probes with simple tokenizers, and for values computed from given log-probabilities."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from z2all_ds.base.errors import DataError
from z2all_ds.evaluate.probe_rows import encode_probes, expectations_met, read_value, summary_line
from z2all_ds.evaluate.probe_runs import PlainTokenizer
from z2all_ds.evaluate.probes import CompareProbe, CompletionProbe, Probe, SentenceProbe

BEGIN = 1


class PairTokenizer:
    """A tokenizer with one token per byte, except that `{"` and `is` are one token each."""

    PAIRS = (('{"', 1000), ("is", 1001))

    def encode(self, text: str, /) -> list[int]:
        ids: list[int] = []
        while text:
            pair = next(((chars, number) for chars, number in self.PAIRS if text.startswith(chars)), None)
            ids += [pair[1]] if pair else [10 + byte for byte in text[0].encode()]
            text = text[len(pair[0]) if pair else 1 :]
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        chars = {number: chars.encode() for chars, number in self.PAIRS}
        return b"".join(chars.get(number) or bytes([number - 10]) for number in ids).decode(errors="replace")


def asked(probe: Probe, before: tuple[int, ...] = (), max_tokens: int = 100) -> Any:
    (one,) = encode_probes([probe], PairTokenizer(), before, max_tokens)
    return one


def ids(text: str) -> tuple[int, ...]:
    return tuple(PairTokenizer().encode(text))


def test_a_continuation_is_scored_after_its_prompt() -> None:
    (row,) = asked(CompletionProbe(name="a", prompt="ab", completion="is so")).rows
    assert row.ids == ids("abis so") and row.ids[row.first_scored :] == ids("is so") and row.num_bytes == 5


def test_prompt_and_text_are_tokenized_separately_if_the_boundary_is_inside_a_token() -> None:
    (row,) = asked(CompletionProbe(name="a", prompt="thi", completion="s")).rows
    assert row.ids == ids("thi") + ids("s") != ids("this")
    assert row.first_scored == 3


@pytest.mark.parametrize(("prompt", "text"), [("France is", "Paris"), ("France ret", "urns"), ("中国的首都", "是北京")])
def test_separate_tokenization_adds_no_space(prompt: str, text: str) -> None:
    """SentencePiece-like tokenizers add a space before the start of a text; the completion must not get one."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    sentences = ["The capital of France is Paris. 中国的首都是北京。 return returns {} "] * 50 + ["isPa isPa"] * 30
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(sentences, trainer)
    tokenizer = PlainTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    (one,) = encode_probes([CompletionProbe(name="a", prompt=prompt, completion=text)], tokenizer, (), 100)
    (row,) = one.rows
    words = [backend.id_to_token(number) or "" for number in row.ids]
    assert ("".join(words[: row.first_scored]), "".join(words[row.first_scored :])) == (
        "▁" + prompt.replace(" ", "▁"),
        text,
    )


def test_a_text_that_extends_another_is_not_counted_twice() -> None:
    one = asked(CompletionProbe(name="a", prompt="x", completion=("{", "{}", '{"', "[")))
    assert [row.ids for row in one.rows] == [ids("x{"), ids('x{"'), ids("x[")]  # `{"` is a different token from `{`
    reading = read_value(one, [[math.log(0.5)], [math.log(0.125)], [math.log(0.5), math.log(0.5)]])
    assert reading.value == pytest.approx(0.5 + 0.125 + 0.25)
    assert reading.details["log_probability_per_token"] == pytest.approx(math.log(0.5))


def test_the_first_token_is_scored_only_after_a_begin_of_text_token() -> None:
    (row,) = asked(SentenceProbe(name="a", text="is it")).rows
    assert (row.first_scored, row.num_bytes) == (1, 3)
    (row,) = asked(SentenceProbe(name="a", text="中a")).rows
    assert (row.first_scored, row.num_bytes) == (1, 3)  # two bytes of 中 remain
    (row,) = asked(SentenceProbe(name="a", text="is it"), before=(BEGIN,)).rows
    assert (row.ids, row.first_scored, row.num_bytes) == ((BEGIN, *ids("is it")), 1, 5)


def test_perplexity_and_bits_per_byte() -> None:
    one = asked(SentenceProbe(name="a", text="abc"))
    reading = read_value(one, [[math.log(0.5), math.log(0.125)]])
    assert reading.value == pytest.approx(4.0)
    assert reading.details == pytest.approx({"tokens": 2, "bits_per_byte": 2.0})
    assert read_value(one, [[-1e6, -1e6]]).value == pytest.approx(math.exp(700))  # no overflow


@pytest.mark.parametrize(("per", "margin"), [("sum", -2 + 3), ("token", -2 / 1 + 3 / 3), ("byte", -2 / 2 + 3 / 3)])
def test_a_comparison_returns_the_margin_in_the_requested_unit(per: str, margin: float) -> None:
    one = asked(CompareProbe.model_validate({"name": "a", "prompt": "x", "better": "is", "worse": "abc", "per": per}))
    assert read_value(one, [[-2.0], [-1.0, -1.0, -1.0]]).value == pytest.approx(margin)


def test_too_long_and_too_short_texts_are_refused() -> None:
    probe = SentenceProbe(name="long", text="abcdef")
    asked(probe, max_tokens=6)
    with pytest.raises(DataError, match="probe long: has 6 tokens, but a sequence holds 5"):
        asked(probe, max_tokens=5)
    with pytest.raises(DataError, match="probe short: has a text of a single token with nothing before it"):
        asked(SentenceProbe(name="short", text="is"))


def test_a_missing_value_fails_its_expectation() -> None:
    probes = [CompletionProbe(name=name, prompt="x", completion="y", at_least=0.5) for name in "abc"]
    passed = expectations_met({"a": 0.6, "b": 0.4}, probes, step=3)
    assert passed == {"a": True, "b": False, "c": False}
    assert summary_line(passed, 3) == "1 of 3 as expected (not: b, c)"
    assert summary_line({}, 3) == "3 measured, none judged"
