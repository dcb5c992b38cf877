"""A tiny random Llama folder with the small tokenizer, written by plain transformers."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

WINDOW_TOKENS = 48


@pytest.fixture(scope="session")
def model_folder(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests only read it; copy before changing anything."""
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    tokenizer = AutoTokenizer.from_pretrained(small_tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW_TOKENS,
        initializer_range=0.2,  # large, so that the model has an opinion
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in small_tokenizer.iterdir():
        shutil.copy2(file, folder / file.name)
    return folder
