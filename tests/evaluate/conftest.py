"""Fixtures with tiny random models: a Llama folder written by plain transformers, a run, and its export."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.helpers.checkpoints import write_run
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.evaluate.loading import LoadedModel, load_model
from z2all_ds.export.to_hf import export_checkpoint

WINDOW_TOKENS = 48
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW_TOKENS,
}
MODEL = ModelSection(vocab_size=1280, **SHAPE)


@pytest.fixture(scope="session")
def model_folder(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama folder with the small tokenizer. Tests must copy it before they change anything."""
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    tokenizer = AutoTokenizer.from_pretrained(small_tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        **SHAPE,
        initializer_range=0.2,  # large, so that predictions differ clearly
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in small_tokenizer.iterdir():
        shutil.copy2(file, folder / file.name)
    return folder


@pytest.fixture(scope="session")
def loaded(model_folder: Path) -> LoadedModel:
    return load_model(model_folder)


@pytest.fixture(scope="session")
def run(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Write a run with checkpoints of steps 7 and 9."""
    return write_run(tmp_path_factory.mktemp("evaluate") / "run", MODEL, small_corpus, small_tokenizer, 7, 9)


@pytest.fixture(scope="session")
def exported(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the checkpoint of step 9."""
    return export_checkpoint(run.root, tmp_path_factory.mktemp("evaluate") / "export", dtype="fp32").folder
