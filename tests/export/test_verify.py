"""Tests for verification: equal weights pass and others are refused, with both methods of loading a folder."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.making import make, seal, write_temporary
from tests.helpers.models import TINY
from tests.helpers.stock_names import to_stock
from z2all_ds.base.errors import CheckpointError, ExportError
from z2all_ds.checkpoint.fixed_tokens import Probe
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.corpus import Executor
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.export.verify import Logits, TrainedLoss, Verdict, compare_with_folder, fits_whole, real_texts
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.tokenizer import Z2allTokenizer, load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def tokenizer(small_tokenizer: Path) -> Z2allTokenizer:
    return load_tokenizer(small_tokenizer)


@pytest.fixture
def model(tokenizer: Z2allTokenizer) -> Z2allForCausalLM:
    torch.manual_seed(0)
    return Z2allForCausalLM(Z2allConfig.from_section(TINY, **tokenizer.model_token_ids)).eval()


def logits_of(model: Z2allForCausalLM) -> Logits:
    """Return the logits function of a model in memory."""

    def logits(texts: list[list[int]]) -> Iterator[Tensor]:
        with torch.no_grad():
            for ids in texts:
                yield model(torch.tensor([ids])).logits[0]

    return logits


def write_folder(model: Z2allForCausalLM, small_tokenizer: Path, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Write the files of an export with transformers itself."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM(model.config.to_llama())
    llama.load_state_dict(to_stock(model.state_dict(), model.config))
    llama.save_pretrained(folder, max_shard_size=max_shard_size)
    for name in TOKENIZER_FILES:
        shutil.copy(small_tokenizer / name, folder / name)
    return folder


def compare(
    model: Z2allForCausalLM, tokenizer: Z2allTokenizer, folder: Path, texts: dict[str, str], whole: bool = True
) -> Verdict:
    return compare_with_folder(logits_of(model), tokenizer, folder, texts, max_tokens=64, whole=whole)


@pytest.mark.parametrize("whole", [True, False])
def test_equal_weights_pass_verification(
    whole: bool,
    model: Z2allForCausalLM,
    tokenizer: Z2allTokenizer,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
) -> None:
    texts = real_texts(small_corpus, tokenizer)
    assert sorted(texts) == ["code", "en", "zh"]
    folder = write_folder(model, small_tokenizer, tmp_path, "1GB" if whole else "50KB")
    verdict = compare(model, tokenizer, folder, texts, whole)
    assert verdict.max_relative_difference <= 1e-6
    assert verdict.tokens_compared > 100
    assert verdict.how == ("from_pretrained" if whole else "layer by layer")
    assert len(verdict.generated) == (3 if whole else 0)


@pytest.mark.parametrize(("damage", "whole"), [(1e-2, True), (1e-2, False), (float("nan"), False)])
def test_one_changed_weight_is_detected(
    damage: float,
    whole: bool,
    model: Z2allForCausalLM,
    tokenizer: Z2allTokenizer,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
) -> None:
    folder = write_folder(model, small_tokenizer, tmp_path)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] += damage
    with pytest.raises(ExportError, match=r"logits on the .* text differ by"):
        compare(model, tokenizer, folder, real_texts(small_corpus, tokenizer), whole)


def test_texts_of_a_corpus_with_invalid_records_are_those_after_them(tokenizer: Z2allTokenizer, tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text('{"content": "one"}\n{"content": null}\n{"content": ""}\n{"content": "two"}\n')
    adopt_corpus(tmp_path, executor=Executor(1), on_error="skip")
    assert real_texts(tmp_path, tokenizer) == {"web": "two"}


def test_a_text_that_spells_a_control_token_is_not_compared(tokenizer: Z2allTokenizer, tmp_path: Path) -> None:
    """transformers makes it the token for some tokenizers, this package for none."""
    (tmp_path / "web.jsonl").write_text('{"content": "one"}\n{"content": "a <|endoftext|> b"}\n{"content": "two"}\n')
    adopt_corpus(tmp_path, executor=Executor(1))
    assert real_texts(tmp_path, tokenizer) == {"web": "two"}


def test_a_folder_that_needs_this_package_is_refused_as_llama(
    model: Z2allForCausalLM, tokenizer: Z2allTokenizer, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = write_folder(model, small_tokenizer, tmp_path)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"llama"', '"z2all"'))
    with pytest.raises(ExportError, match="does not load without this package"):
        compare(model, tokenizer, folder, {"en": "Hello"})


def test_another_tokenizer_is_detected(
    model: Z2allForCausalLM, tokenizer: Z2allTokenizer, small_tokenizer: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    folder = write_folder(model, small_tokenizer, tmp_path)
    other = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other.pre_tokenizer = None
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ExportError, match="encodes the en text differently"):
        compare(model, tokenizer, folder, {"en": "def main(): return 42"}, whole=False)


def test_only_models_that_fit_into_memory_are_loaded_whole() -> None:
    assert fits_whole(1_000_000)
    assert not fits_whole(10**13)


@pytest.mark.parametrize(
    ("trained_in", "dtype", "accepted", "refused"),
    [
        ("fp32", "fp32", 5e-5, 2e-4),
        ("fp32", "bf16", 1e-3, 3e-3),
        ("bf16", "fp32", 1e-3, 3e-3),
        ("fp8", "bf16", 2e-2, 4e-2),
    ],
)
def test_the_allowed_difference_of_the_loss_depends_on_the_precision(
    trained_in: str, dtype: str, accepted: float, refused: float, tmp_path: Path
) -> None:
    make(tmp_path, 1)
    without = Checkpoint(tmp_path / "step_00000001", 1)
    assert TrainedLoss.of(without, 50, dtype) is None
    for off in (0.0, accepted, -accepted, refused, -refused, math.nan):
        # Logits of zero give ln(50) on any tokens.
        probe = Probe(8, trained_in, math.log(50) / (1 + off))
        write_temporary(tmp_path, 2, probe=probe.as_record())
        trained = TrainedLoss.of(Checkpoint(seal(tmp_path, 2), 2), 50, dtype)
        assert trained and len(trained.ids) == 9
        if abs(off) <= accepted:
            assert trained.require(tmp_path, torch.zeros(8, 50)) == pytest.approx(abs(off), abs=1e-6)
        else:
            with pytest.raises(ExportError, match=r"its loss on fixed tokens is 3\.912023, and "):
                trained.require(tmp_path, torch.zeros(8, 50))


@pytest.mark.parametrize("probe", [5, [], {}, {"tokens": 0, "dtype": "fp32", "loss": 4.0}, {"tokens": 8, "loss": 1.0}])
def test_a_damaged_record_of_the_loss_is_one_line(probe: Any, tmp_path: Path) -> None:
    write_temporary(tmp_path, 1, probe=probe)
    with pytest.raises(CheckpointError, match="wrong probe"):
        TrainedLoss.of(Checkpoint(seal(tmp_path, 1), 1), 50, "fp32")
