"""Continuations against transformers' own generate."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from z2all_ds.errors import ConfigError, DataError
from z2all_ds.evaluate.generate import continue_prompts

PROMPTS = ["def add(a, b):\n    return", "今天", "import os"]


def test_greedy_is_transformers_greedy(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    wanted = []
    for prompt in PROMPTS:  # one at a time, so that padding is tested too
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        made = model.generate(
            encoded["input_ids"], attention_mask=encoded["attention_mask"], max_new_tokens=12, do_sample=False
        )
        wanted.append(tokenizer.decode(made[0], skip_special_tokens=True))
    found = continue_prompts(model_folder, PROMPTS, max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0)
    assert found == wanted
    for prompt, text in zip(PROMPTS, found, strict=True):
        assert text.startswith(prompt)
        assert len(text) > len(prompt)


def test_sampling_follows_the_seed(model_folder: Path) -> None:
    first, again, other = (
        continue_prompts(model_folder, PROMPTS[:1], max_new_tokens=12, temperature=1.5, top_p=0.95, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("max_new_tokens", "temperature", "top_p"),
    [(0, 0.0, 1.0), (-3, 0.0, 1.0), (5, -0.1, 1.0), (5, 1.0, 0.0), (5, 1.0, 1.1), (5, float("nan"), 1.0)],
)
def test_numbers_that_cannot_be_meant(
    model_folder: Path, max_new_tokens: int, temperature: float, top_p: float
) -> None:
    with pytest.raises(ConfigError) as caught:
        continue_prompts(model_folder, PROMPTS, max_new_tokens, temperature, top_p, seed=0)
    assert f"temperature={temperature}, top_p={top_p}, max_new_tokens={max_new_tokens}" in str(caught.value)
    assert "temperature >= 0, 0 < top_p <= 1, max_new_tokens >= 1" in str(caught.value)


@pytest.mark.parametrize("prompts", [[], [""], ["fine", ""]], ids=str)
def test_nothing_to_continue(model_folder: Path, prompts: list[str]) -> None:
    with pytest.raises(ConfigError, match="each must hold at least one character"):
        continue_prompts(model_folder, prompts, 5, 0.0, 1.0, seed=0)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no Hugging Face folder \(no config\.json\)\. Give an export"):
        continue_prompts(tmp_path / "nowhere", PROMPTS, 5, 0.0, 1.0, seed=0)
