"""The gate of an export: what it lets pass, and that it stops what differs."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.models import TINY
from z2all_ds.errors import ExportError
from z2all_ds.export.verify import compare_with_folder, real_texts
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.stock_keys import to_stock
from z2all_ds.tokenizer import Z2allTokenizer, load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def tokenizer(small_tokenizer: Path) -> Z2allTokenizer:
    return load_tokenizer(small_tokenizer)


@pytest.fixture
def model(tokenizer: Z2allTokenizer) -> Z2allForCausalLM:
    torch.manual_seed(0)
    return Z2allForCausalLM(Z2allConfig.from_section(TINY, **tokenizer.model_token_ids)).eval()


def write_folder(model: Z2allForCausalLM, small_tokenizer: Path, folder: Path) -> Path:
    """What an export holds, written by transformers itself."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM(model.config.to_llama())
    llama.load_state_dict(to_stock(model.state_dict(), model.config))
    llama.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(small_tokenizer / name, folder / name)
    return folder


def test_equal_weights_pass(
    model: Z2allForCausalLM, tokenizer: Z2allTokenizer, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    texts = real_texts(small_corpus, tokenizer)
    assert sorted(texts) == ["code", "en", "zh"]
    verdict = compare_with_folder(model, tokenizer, write_folder(model, small_tokenizer, tmp_path), texts)
    assert verdict.max_relative_difference <= 1e-6
    assert verdict.tokens_compared > 100
    assert len(verdict.generated) == 3


@pytest.mark.parametrize("damage", [1e-2, float("nan")])
def test_one_changed_weight_is_found(
    damage: float,
    model: Z2allForCausalLM,
    tokenizer: Z2allTokenizer,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
) -> None:
    folder = write_folder(model, small_tokenizer, tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += damage
    with pytest.raises(ExportError, match=r"logits on the .* text differ by"):
        compare_with_folder(model, tokenizer, folder, real_texts(small_corpus, tokenizer))


def test_a_folder_that_does_not_load_is_named(
    model: Z2allForCausalLM, tokenizer: Z2allTokenizer, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = write_folder(model, small_tokenizer, tmp_path)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"llama"', '"z2all"'))
    with pytest.raises(ExportError, match="does not load without this package"):
        compare_with_folder(model, tokenizer, folder, {"en": "Hello"})


def test_another_tokenizer_is_found(
    model: Z2allForCausalLM, tokenizer: Z2allTokenizer, small_tokenizer: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    folder = write_folder(model, small_tokenizer, tmp_path)
    other = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.pre_tokenizer = None
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ExportError, match="reads the en text differently"):
        compare_with_folder(model, tokenizer, folder, {"en": "def main(): return 42"})
