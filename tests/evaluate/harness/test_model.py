"""Tests for the harness adapter, compared with a plain loop and with the harness's own model."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import BloomConfig, BloomForCausalLM

from tests.helpers.memorised import CPU, load, tiny_llama, untrained
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.evaluate.generate import StopCheck
from z2all_ds.evaluate.harness.model import HarnessModel
from z2all_ds.evaluate.loading import LoadedModel

SHORT_WINDOW = 40
TEXTS = ["水在标准大气压下的沸点是多少摄氏度？" * 6, "short", "Which animal barks? " * 20]


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=("t", number, 1))
        for number, one in enumerate(arguments)
    ]


def requests_of(name: str) -> list[Instance]:
    task = load(name)["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests()
    requests: list[Instance] = task.instances
    return requests


def plain_likelihood(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of the continuation, token by token, and whether it is the greedy one."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        logits = model(ids).logits[0].log_softmax(-1)
    total, greedy = 0.0, True
    for place, token in enumerate(continuation, start=len(context)):
        total += float(logits[place - 1, token])
        greedy = greedy and int(logits[place - 1].argmax()) == token
    return total, greedy


@contextmanager
def memory_for(rows: int, model: Any) -> Iterator[None]:
    """Simulate a GPU that runs out of memory with more than `rows` rows."""

    def limit(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        if len(named["input_ids"]) > rows:
            raise torch.OutOfMemoryError(f"{len(named['input_ids'])} rows")

    hook = model.register_forward_pre_hook(limit, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def harness_own(small_tokenizer: Path) -> Any:
    """Return the harness's own wrapper of a model with a short window, and our wrapper of the same model."""
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate")
    from lm_eval.models.huggingface import HFLM

    loaded = untrained(small_tokenizer)
    model = tiny_llama(loaded.tokenizer, seed=1, window_tokens=SHORT_WINDOW)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    theirs = HFLM(pretrained=model, tokenizer=loaded.tokenizer, batch_size=4)
    return theirs, HarnessModel(replace(loaded, model=model), batch_size=3)


@pytest.mark.parametrize("name", ["zh_school", "science"])
def test_likelihoods_equal_those_of_a_plain_loop(small_tokenizer: Path, name: str) -> None:
    loaded = untrained(small_tokenizer)
    ours = HarnessModel(loaded, batch_size=5)
    requests = requests_of(name)
    for request, (nats, greedy) in zip(requests, ours.loglikelihood(requests), strict=True):
        context, continuation = request.args
        whole, start = loaded.tokenizer.encode(context + continuation), loaded.tokenizer.encode(context)
        expected, expected_greedy = plain_likelihood(loaded.model, start, whole[len(start) :])
        assert nats == pytest.approx(expected, abs=2e-4)
        assert greedy == expected_greedy


def test_long_prompts_are_truncated_as_in_the_harness(harness_own: Any) -> None:
    theirs, ours = harness_own
    requests = requests_of("zh_school") + requests_of("science")
    expected = theirs.loglikelihood(requests, disable_tqdm=True)
    for (nats, greedy), (their_nats, their_greedy) in zip(ours.loglikelihood(requests), expected, strict=True):
        assert nats == pytest.approx(their_nats, abs=2e-4)
        assert greedy == their_greedy
    assert ours.prompts_cut > 0


def test_empty_contexts_and_whole_texts_score_as_in_the_harness(harness_own: Any) -> None:
    theirs, ours = harness_own
    alone = instances("loglikelihood", ("", "Monday"), ("", "一年有几个季节"))
    assert [nats for nats, _ in ours.loglikelihood(alone)] == pytest.approx(
        [nats for nats, _ in theirs.loglikelihood(alone, disable_tqdm=True)], abs=2e-4
    )
    texts = instances("loglikelihood_rolling", *((text,) for text in TEXTS))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), abs=2e-3
    )


def test_generated_texts_equal_those_of_the_harness_and_end_at_stop_strings(harness_own: Any) -> None:
    theirs, ours = harness_own
    free = {"until": ["不会出现的"], "max_gen_toks": 12, "do_sample": False}
    prompts = ["1 + 2 =", "水的沸点", TEXTS[0]]
    requests = instances("generate_until", *((prompt, free) for prompt in prompts))
    texts = ours.generate_until(requests)
    assert texts == theirs.generate_until(requests, disable_tqdm=True)
    stop = texts[1][2:4]
    stopped = instances("generate_until", *((prompt, {**free, "until": [stop]}) for prompt in prompts))
    assert stop
    assert ours.generate_until(stopped) == [text.split(stop)[0] for text in texts]


def test_requests_with_different_settings_are_not_mixed(small_tokenizer: Path) -> None:
    loaded = untrained(small_tokenizer)
    ours = HarnessModel(loaded, batch_size=8)
    short: dict[str, Any] = {"until": [], "max_gen_toks": 1, "do_sample": False}
    long = short | {"max_gen_toks": 9}
    first, second, third = ours.generate_until(instances("generate_until", ("a", short), ("a", long), ("a", short)))
    assert first == third and len(second) > len(first) and second.startswith(first)


def test_an_answer_longer_than_the_window_is_refused(harness_own: Any) -> None:
    with pytest.raises(ConfigError, match=f"window of {SHORT_WINDOW}"):
        harness_own[1].loglikelihood(instances("loglikelihood", ("a", TEXTS[0])))


def test_batches_are_halved_when_memory_runs_out(small_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = untrained(small_tokenizer)

    def ours() -> HarnessModel:
        return HarnessModel(loaded, batch_size=8)

    prompts = [f"{number} + {'1' * number} =" for number in range(19)]
    scored = instances("loglikelihood", *((prompt, f" {number}") for number, prompt in enumerate(prompts)))
    free = {"until": [], "max_gen_toks": 3, "do_sample": False}
    written = instances("generate_until", *((prompt, free) for prompt in prompts))
    likelihoods, texts = ours().loglikelihood(scored), ours().generate_until(written)
    with memory_for(3, loaded.model):
        tight = ours().loglikelihood(scored)
        assert [nats for nats, _ in tight] == pytest.approx([nats for nats, _ in likelihoods], abs=2e-4)
        assert ours().generate_until(written) == texts
    assert "8 prompts at a time do not fit into memory: 4 from now on" in capsys.readouterr().err
    with memory_for(0, loaded.model), pytest.raises(MachineError, match="does not fit"):
        ours().generate_until(written)


def test_beams_and_penalties_of_a_task_are_used(harness_own: Any) -> None:
    theirs, ours = harness_own
    free = {"until": ["不会出现的"], "max_gen_toks": 12, "do_sample": False}
    found = []
    for more in ({}, {"num_beams": 3}, {"repetition_penalty": 0.3}):
        requests = instances("generate_until", *((prompt, {**free, **more}) for prompt in ("1 + 2 =", "水的沸点")))
        found.append(tuple(ours.generate_until(requests)))
        assert list(found[-1]) == theirs.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) == 3
    with pytest.raises(ConfigError, match="num_beems"):
        ours.generate_until(instances("generate_until", ("a", {**free, "num_beems": 2})))


def test_a_task_cannot_make_transformers_run_code(small_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "custom_generate").mkdir()
    code = f"def generate(model, input_ids, **_):\n    open({str(tmp_path / 'ran')!r}, 'w')\n    return input_ids\n"
    (tmp_path / "custom_generate" / "generate.py").write_text(code)
    how = {"until": [], "max_gen_toks": 1, "custom_generate": str(tmp_path), "trust_remote_code": True}
    ours = HarnessModel(untrained(small_tokenizer), batch_size=1)
    with pytest.raises(ConfigError, match="generation_kwargs: custom_generate"):
        ours.generate_until(instances("generate_until", ("a", {"max_new_tokens": 1, "top_p": 0.9}), ("a", how)))
    assert not (tmp_path / "ran").exists()


def test_stop_strings_are_checked_again_after_beams_swap_rows(small_tokenizer: Path) -> None:
    tokenizer = untrained(small_tokenizer).tokenizer
    check = StopCheck(tokenizer, ["7"], prompt_tokens=0)
    ended, open_ended = (tokenizer.encode(text, add_special_tokens=False) for text in ("7", "8"))
    assert check(torch.tensor([ended, open_ended]), None).tolist() == [True, False]
    assert check(torch.tensor([open_ended, ended]), None).tolist() == [False, True]


def test_a_config_without_a_maximum_length_is_accepted(small_tokenizer: Path) -> None:
    tokenizer = untrained(small_tokenizer).tokenizer
    bloom = BloomForCausalLM(BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2)).eval()
    ours = HarnessModel(LoadedModel(bloom, tokenizer, CPU, "bloom", None), batch_size=2)
    ((nats, _),) = ours.loglikelihood(instances("loglikelihood", ("1 + 2 =", " 3")))
    context, whole = tokenizer.encode("1 + 2 ="), tokenizer.encode("1 + 2 = 3")
    assert nats == pytest.approx(plain_likelihood(bloom, context, whole[len(context) :])[0], abs=2e-4)
