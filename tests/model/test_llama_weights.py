"""Llama's tensors read under Z2all's names, from one file or several, for every kind of vocabulary change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llama_folders import make_llama
from z2all_ds.base.llama_folder import EMBEDDING, HEAD, LlamaFolder
from z2all_ds.base.vocabulary_rows import NEW, VocabularyRows
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.llama_weights import NOISE, LlamaWeights

SMALL: dict[str, Any] = {"vocab_size": 40}


def rows(*numbers: int) -> VocabularyRows:
    return VocabularyRows(list(numbers), "id")


def weights_of(folder: Path, which: VocabularyRows, seed: int = 7) -> LlamaWeights:
    return LlamaWeights(LlamaFolder(folder), which, seed)


@pytest.mark.parametrize(
    ("shard", "changes"),
    [
        ("5GB", {}),
        ("9KB", {"tie_word_embeddings": True}),
        ("9KB", {"attention_bias": True}),
        ("5GB", {"dtype": torch.bfloat16}),
    ],
)
def test_weights_equal_those_that_transformers_loads(shard: str, changes: dict[str, Any], tmp_path: Path) -> None:
    make_llama(tmp_path, max_shard_size=shard, **SMALL, **changes)
    wanted = Z2allForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = weights_of(tmp_path, rows(*range(40)))
    names = [name for name, _ in wanted.named_parameters()]
    assert len(names) == (14 if "tie_word_embeddings" in changes else 19 if "attention_bias" in changes else 15)
    for name, weight in wanted.named_parameters():
        found = weights.parameter(name)
        assert found.dtype == torch.float32 and torch.equal(found, weight), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_llama(folder, **SMALL).state_dict()


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_new_vocabulary_rows_are_the_mean_plus_seeded_noise(name: str, llama: tuple[Path, dict[str, Tensor]]) -> None:
    folder, there = llama
    which = rows(*range(40), *([NEW] * 5))
    found = weights_of(folder, which).parameter(name)
    assert torch.equal(found[:40], there[name])
    mean, deviation = there[name].double().mean(0), there[name].double().std(0, correction=0)
    standard = (found[40:] - mean) / (NOISE * deviation)
    # 160 normal values: none is beyond five deviations, and their sample deviation is accurate to 6 %.
    assert standard.abs().max() < 5 and standard.std().item() == pytest.approx(1, abs=0.3)
    assert len(found[40:].unique(dim=0)) == 5
    assert torch.equal(weights_of(folder, which).parameter(name), found)
    assert not torch.equal(weights_of(folder, which, seed=8).parameter(name)[40:], found[40:])


def test_the_head_and_the_embedding_get_different_noise(llama: tuple[Path, dict[str, Tensor]]) -> None:
    folder, there = llama
    weights = weights_of(folder, rows(*range(40), NEW))
    embedding, head = (weights.parameter(name)[40] - there[name].mean(0) for name in (EMBEDDING, HEAD))
    assert torch.nn.functional.cosine_similarity(embedding, head, dim=0).abs() < 0.7


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_smaller_or_reordered_vocabulary_selects_rows(name: str, llama: tuple[Path, dict[str, Tensor]]) -> None:
    folder, there = llama
    assert torch.equal(weights_of(folder, rows(*range(30))).parameter(name), there[name][:30])
    found = weights_of(folder, rows(7, 3, NEW, 39)).parameter(name)
    assert torch.equal(found[[0, 1, 3]], there[name][[7, 3, 39]])


def test_other_weights_do_not_depend_on_the_vocabulary(llama: tuple[Path, dict[str, Tensor]]) -> None:
    folder, there = llama
    found = weights_of(folder, rows(1, 0)).parameter("model.norm.weight")
    assert torch.equal(found, there["model.norm.weight"])
