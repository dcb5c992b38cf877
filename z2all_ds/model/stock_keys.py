"""Fused weights under the stock Llama names: one qkv product and one gate_up product inside, five matrices outside.

Pure functions on {name: tensor}; the row order inside a fused matrix is q, k, v and gate, up. Works on any tensors
that slice and concatenate along dimension 0, so also on shards that stream through an export one at a time.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import LlamaConfig

QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"


def _parts(config: LlamaConfig) -> dict[str, list[tuple[str, int]]]:
    """Fused module -> (stock module, rows), in row order."""
    head_dim = config.hidden_size // config.num_attention_heads
    query_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        QKV: [("self_attn.q_proj", query_rows), ("self_attn.k_proj", kv_rows), ("self_attn.v_proj", kv_rows)],
        GATE_UP: [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)],
    }


def split_tensor(name: str, tensor: Tensor, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """One tensor of ours as the stock tensors it holds (itself, unless it is a fused one)."""
    for fused, parts in _parts(config).items():
        if f".{fused}." in name:
            rows = tensor.split([count for _, count in parts], dim=0)
            for (stock, _), part in zip(parts, rows, strict=True):
                yield name.replace(fused, stock), part
            return
    yield name, tensor


def to_stock(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Our state dict under Llama's names."""
    return {stock: part for name, tensor in state.items() for stock, part in split_tensor(name, tensor, config)}


def from_stock(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Llama's state dict under our names; whatever is not part of a fused matrix passes through."""
    remaining = dict(state)
    merged: dict[str, Tensor] = {}
    for fused, parts in _parts(config).items():
        first_stock = parts[0][0]
        for name in [n for n in remaining if f".{first_stock}." in n]:
            pieces = [remaining.pop(name.replace(first_stock, stock)) for stock, _ in parts]
            merged[name.replace(first_stock, fused)] = torch.cat(pieces, dim=0)
    return {**remaining, **merged}
