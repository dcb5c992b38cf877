"""Small random Z2all models, and stock Llama models with the same weights."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.helpers.stock_names import to_stock
from z2all_ds.model import Z2allConfig, Z2allForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "every-head-its-own": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 32},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def tiny_config(**changes: Any) -> Z2allConfig:
    fields: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # large, so that logits differ and a wrong one is noticed
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Z2allConfig(**{**fields, **changes})


def tiny_model(seed: int = 0, **changes: Any) -> Z2allForCausalLM:
    """Return a model in eval mode. Biases and norms are random too, so that a lost one is noticed."""
    torch.manual_seed(seed)
    model = Z2allForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def pair(seed: int = 0, **changes: Any) -> tuple[Z2allForCausalLM, LlamaForCausalLM]:
    ours = tiny_model(seed, **changes)
    llama = LlamaForCausalLM(ours.config.to_llama()).eval()
    llama.load_state_dict(to_stock(ours.state_dict(), ours.config), strict=True)
    return ours, llama


def some_ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 61, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference divided by the largest wanted entry; NaN stays NaN and fails every comparison."""
    assert found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
