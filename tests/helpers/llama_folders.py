"""Small real Llama folders, created and saved by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MICRO_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
"""The model shape of MICRO_OVERRIDES in training.py."""


def make_llama(folder: Path, max_shard_size: str = "5GB", dtype: Any = torch.float32, **changes: Any) -> Any:
    """Save a model whose weights are all random, including norms, and return it in eval mode."""
    torch.manual_seed(4)
    config = LlamaConfig(**{**MICRO_SHAPE, "initializer_range": 0.1, **changes})
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
