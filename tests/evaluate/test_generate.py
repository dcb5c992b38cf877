"""Tests for generation, compared with `generate` of transformers: prompts, batches, streams, stop strings and chats."""

import json
import os
import re
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.evaluate import converse
from z2all_ds.evaluate.generate import CUT, ENDED, STOPPED, Generator, Sampling
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.evaluate.prompts import (
    Answer,
    chat_ids,
    end_of_turn,
    is_chat,
    read_prompts,
    with_answers,
)

PROMPTS = ["def add(a, b):\n    return", "今天", "import os"]
GREEDY = Sampling(max_new_tokens=12)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ '[assistant]' }}"


def texts(loaded: LoadedModel, prompts: list[str], sampling: Sampling, batch: int = 8, num: int = 1) -> list[str]:
    return [answer.text for answer in Generator(loaded, sampling).answer_all(prompts, batch, num)]


def test_greedy_answers_equal_those_of_transformers(model_folder: Path, loaded: LoadedModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    wanted = []
    for prompt in PROMPTS:  # one at a time, so that the reference has no padding
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        made = model.generate(
            encoded["input_ids"], attention_mask=encoded["attention_mask"], max_new_tokens=12, do_sample=False
        )
        wanted.append(tokenizer.decode(made[0], skip_special_tokens=True))
    answers = list(Generator(loaded, GREEDY).answer_all(PROMPTS))
    assert [answer.prompt + answer.text for answer in answers] == wanted
    assert all(answer.text for answer in answers)
    assert (
        texts(loaded, PROMPTS, GREEDY, batch=1) == texts(loaded, PROMPTS, GREEDY, batch=2) == [a.text for a in answers]
    )
    pieces: list[str] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        pieces.clear()
        assert Generator(loaded, GREEDY).stream(prompt, pieces.append) == answer
        assert "".join(pieces) == answer.text and len(pieces) > 1


def test_the_seed_determines_sampled_answers(loaded: LoadedModel) -> None:
    how = Sampling(max_new_tokens=12, temperature=1.5, top_p=0.95, top_k=500, min_p=0.001, seed=1)
    first, again, other = (texts(loaded, PROMPTS, replace(how, seed=seed), num=2) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 6
    narrow = replace(how, top_k=1)
    assert texts(loaded, PROMPTS, narrow) == texts(loaded, PROMPTS, GREEDY)
    answers = list(Generator(loaded, how).answer_all(PROMPTS, batch=4, num=2))
    assert [(answer.prompt, answer.sample) for answer in answers] == [(p, n) for p in PROMPTS for n in range(2)]


def test_a_large_repetition_penalty_prevents_repetition(loaded: LoadedModel) -> None:
    """No token repeats if the penalty is larger than any logit."""
    (answer,) = Generator(loaded, replace(GREEDY, repetition_penalty=1e6)).answer_all(["今天"])
    ids = loaded.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    assert answer.new_tokens > 3 and "今天" not in answer.text
    assert len(set(ids)) >= answer.new_tokens - 1


def test_answers_end_before_a_stop_string(loaded: LoadedModel) -> None:
    whole = texts(loaded, PROMPTS, GREEDY)
    stop = whole[1][3:5]
    answers = list(Generator(loaded, replace(GREEDY, stop=("never there", stop))).answer_all(PROMPTS))
    assert answers[1].text == whole[1][: whole[1].find(stop)]
    assert answers[1].finish == STOPPED and answers[1].new_tokens < 12
    for answer, text in zip(answers, whole, strict=True):
        assert answer.text == text.partition(stop)[0]
    pieces: list[str] = []
    assert Generator(loaded, replace(GREEDY, stop=(stop,))).stream(PROMPTS[1], pieces.append) == answers[1]
    assert "".join(pieces) == answers[1].text


def without_padding_token(loaded: LoadedModel) -> LoadedModel:
    tokenizer = deepcopy(loaded.tokenizer)
    tokenizer.pad_token = None
    return replace(loaded, tokenizer=tokenizer)


def saying(loaded: LoadedModel, prompt: str, token: int) -> LoadedModel:
    """Return the same model, changed to generate this token after the prompt."""
    model = deepcopy(loaded.model)
    ids = loaded.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"].to(loaded.device)
    with torch.no_grad():
        last = model.model(input_ids=ids).last_hidden_state[0, -1]
        head = model.lm_head.weight
        head[token] = last * (1.3 * (head @ last).max() / (last @ last))
    return replace(loaded, model=model)


def test_a_control_token_works_as_a_stop_string(loaded: LoadedModel) -> None:
    """The decoded text does not contain control tokens, so a text search would not find it."""
    stop = "<|im_end|>"
    ends_so = saying(loaded, "今天", loaded.tokenizer.convert_tokens_to_ids(stop))
    (plain,) = Generator(ends_so, GREEDY).answer_all(["今天"])
    assert plain.new_tokens == 12
    (answer,) = Generator(ends_so, replace(GREEDY, stop=(stop,))).answer_all(["今天"])
    assert (answer.text, answer.finish, answer.new_tokens) == ("", STOPPED, 1)


def test_batches_work_without_a_padding_token(loaded: LoadedModel) -> None:
    """If end-of-text were used for padding, it would be penalised as a repetition and end answers early."""
    ends_soon = saying(without_padding_token(loaded), "今天", loaded.tokenizer.eos_token_id)
    stop = texts(loaded, ["import os"], GREEDY)[0][2:5]
    how = replace(GREEDY, repetition_penalty=1.5, stop=(stop,))
    alone = [next(iter(Generator(ends_soon, how).answer_all([prompt]))) for prompt in PROMPTS]
    assert (alone[1].finish, alone[1].new_tokens) == (ENDED, 1)
    assert list(Generator(ends_soon, how).answer_all(PROMPTS)) == alone
    stopped = [next(iter(Generator(loaded, replace(GREEDY, stop=(stop,))).answer_all([one]))) for one in PROMPTS]
    assert {STOPPED, CUT} <= {answer.finish for answer in stopped}
    assert list(Generator(ends_soon, replace(GREEDY, stop=(stop,))).answer_all(PROMPTS))[2] == stopped[2]


def test_only_prompts_with_tokens_beyond_the_vocabulary_are_refused(loaded: LoadedModel) -> None:
    tokenizer = deepcopy(loaded.tokenizer)
    tokenizer.add_tokens([f"<new {number}>" for number in range(30)])
    tokenizer.add_special_tokens({"pad_token": "<new 29>"})
    assert tokenizer.pad_token_id > loaded.model.config.vocab_size
    extended = replace(loaded, tokenizer=tokenizer)
    # The first new tokens may get ids that the model has but the tokenizer did not use.
    without_new = [re.sub(r"<new \d+>", "", text) for text in texts(extended, PROMPTS, GREEDY)]
    assert without_new == texts(loaded, PROMPTS, GREEDY)
    with pytest.raises(DataError, match=r"^token 10\d\d: .* has only 1024\. Use the tokenizer of this model\.$"):
        texts(extended, ["fine", "<new 28>"], GREEDY)


def test_end_of_text_ends_an_answer(loaded: LoadedModel) -> None:
    (usual,) = Generator(loaded, GREEDY).answer_all(["今天"])
    assert (usual.finish, usual.new_tokens) == (CUT, 12)
    generator = Generator(loaded, GREEDY)
    ids = generator.ids_of("今天")
    made = loaded.model.generate(torch.tensor([ids], device=loaded.device), max_new_tokens=12, do_sample=False)
    fifth = made[0, len(ids) + 4].item()
    first = made[0, len(ids) :].tolist().index(fifth)
    generator._ends = [fifth]  # treat it as the end-of-text token
    (ended, _) = generator.answer_all(["今天", "import os"])
    assert (ended.finish, ended.new_tokens) == (ENDED, first + 1)
    assert usual.text.startswith(ended.text)


def test_a_run_and_its_export_give_equal_answers(run: RunFolder, exported: Path) -> None:
    assert texts(load_model(run.root), PROMPTS, GREEDY) == texts(load_model(exported), PROMPTS, GREEDY)


def test_ctrl_c_keeps_the_text_so_far(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(loaded, GREEDY, chat=True)
    (whole,) = generator.answer_all(["今天"])
    pieces: list[str] = []

    def interrupted(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(converse, "write_now", interrupted)
    question, answer = converse._answer(generator, [], "今天")
    assert question == {"role": "user", "content": "今天"}
    assert answer["content"] == "".join(pieces) != whole.text
    assert whole.text.startswith(answer["content"])


# Maximum length


def test_a_prompt_too_long_for_the_model_is_refused(loaded: LoadedModel) -> None:
    long = "今天" * 60
    with pytest.raises(
        ConfigError, match=r"^a prompt of \d+ tokens: .* supports at most 48 including the answer\. Shorten"
    ):
        texts(loaded, ["fine", long], GREEDY)


def test_answers_end_at_the_maximum_length_of_the_model(loaded: LoadedModel, capfd: pytest.CaptureFixture[str]) -> None:
    """A long prompt shortens only its own answer, not the other answers of its batch."""
    tight = loaded.tokenizer.decode(loaded.tokenizer("def add(a, b):\n    return a + b\n" * 9)["input_ids"][:43])
    answers = list(Generator(loaded, GREEDY).answer_all(["今天", tight, "import os"]))
    assert [answer.new_tokens for answer in answers] == [12, 5, 12]
    said = "only 5 new tokens: the model supports 48, the prompt has 43"
    assert capfd.readouterr().err.count(said) == 1
    list(Generator(loaded, GREEDY).answer_all([tight], num=2))
    assert capfd.readouterr().err.count(said) == 1
    Generator(loaded, GREEDY).stream(tight, lambda _: None)
    assert capfd.readouterr().err.count(said) == 1


# Chats


@pytest.fixture
def chatting(model_folder: Path, tmp_path: Path) -> LoadedModel:
    """Load a model with its own chat template."""
    folder = tmp_path / "chatting"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return load_model(folder)


def test_the_chat_template_of_a_model_is_used_by_default(chatting: LoadedModel, loaded: LoadedModel) -> None:
    assert [is_chat(one.tokenizer, None) for one in (chatting, loaded)] == [True, False]
    assert [is_chat(loaded.tokenizer, asked) for asked in (True, False)] == [True, False]
    generator = Generator(chatting, GREEDY, system="简短")
    messages = [{"role": "system", "content": "简短"}, {"role": "user", "content": "今天"}]
    text = "[system]简短<|im_end|>[user]今天<|im_end|>[assistant]"
    assert generator.ids_of("今天") == chatting.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert end_of_turn(chatting.tokenizer) == chatting.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for one in (chatting, loaded):
        wanted: Any = one.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert chat_ids(one.tokenizer, messages) == wanted["input_ids"]
    assert end_of_turn(loaded.tokenizer) in Generator(loaded, GREEDY, chat=True)._ends


def test_invalid_chats_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"^--system: requires chat mode"):
        Generator(loaded, GREEDY, system="x")
    with pytest.raises(
        ConfigError, match=r"^the chat template: rejects this conversation \(a message must not contain"
    ):
        Generator(loaded, GREEDY, chat=True, control_tokens=True).ids_of("<|im_end|>")
    assert Generator(loaded, GREEDY, chat=True).ids_of("<|im_end|>").count(1004) == 1  # the template's own


# Settings and prompt files


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("max_new_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1)),
        *(("top_k", -1), ("min_p", 1.5), ("repetition_penalty", 0.0), ("stop", ("",))),
    ],
)
def test_invalid_sampling_settings_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**{setting: value})
    assert str(caught.value).startswith(f"{setting}={value}: must ")


def test_invalid_prompts_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="must have at least one character"):
        texts(loaded, ["fine", ""], GREEDY)
    with pytest.raises(DataError, match="a prompt: not UTF-8"):
        texts(loaded, ["fine", "\udcff"], GREEDY)
    with pytest.raises(DataError, match="a stop string: not UTF-8"):
        Sampling(stop=("\udcff",))
    with pytest.raises(ConfigError, match="batch=0, num=1: must be at least 1"):
        texts(loaded, PROMPTS, GREEDY, batch=0)


def test_prompt_files_are_read_and_answers_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("今天\r\n\n two words \n", encoding="utf-8")
    assert read_prompts(str(tmp_path / "a.txt")) == [{"prompt": "今天"}, {"prompt": " two words "}]
    records: list[dict[str, Any]] = [{"id": 5, "prompt": "x\ny"}, {"prompt": "z"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert read_prompts(str(tmp_path / "a.jsonl")) == records
    answers = [Answer(record["prompt"], "好", CUT, 1, n) for record in records for n in range(2)]
    found = with_answers(records, answers, 2)
    assert [(one.get("id"), one["prompt"], one["text"], one["sample"]) for one in found] == [
        *((5, "x\ny", "好", 0), (5, "x\ny", "好", 1), (None, "z", "好", 0), (None, "z", "好", 1))
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n \n", "has no prompt"),
        (b"{\n", r"a\.jsonl:1: not JSON"),
        (b'{"prompt": "x"}\n{"text": "x"}', r":2: each line must be an object with a string `prompt`"),
        (b"\xff", r"not readable \(not UTF-8\)"),
        (b'{"prompt": "\\ud800 x"}', r"a\.jsonl:1: not UTF-8, or half a surrogate pair"),
        (b'{"prompt": "x", "id": ["\\ud800"]}', r"a\.jsonl:1: not UTF-8, or half a surrogate pair"),
        (b'{"prompt": "x", "text": "mine"}', r"a\.jsonl:1, field text: the name is used by the answer"),
        (None, r"not readable \(No such file"),
    ],
)
def test_invalid_prompt_files_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_prompts(str(tmp_path / "a.jsonl"))


def test_a_fifo_instead_of_prompts_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts.txt")
    with pytest.raises(DataError, match=r"not readable \(not a regular file"):
        read_prompts(str(tmp_path / "prompts.txt"))
