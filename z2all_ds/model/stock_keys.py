"""Maps fused weights to the stock Llama names: one qkv and one gate_up matrix to five matrices.

Pure functions on {name: tensor}; the row order inside a fused matrix is q, k, v and gate, up. Works on any tensors
that slice and concatenate along dimension 0, including shards that are exported one at a time.
"""

from collections.abc import Iterator

from torch import Tensor
from transformers import LlamaConfig

QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
STOCK_PARTS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}
"""Fused module -> stock modules, in row order."""


def rows_of_parts(fused: str, config: LlamaConfig) -> list[int]:
    """Return the number of rows of each stock module inside a fused one."""
    if fused == GATE_UP:
        return [config.intermediate_size] * 2
    kv_rows = config.num_key_value_heads * config.head_dim
    return [config.num_attention_heads * config.head_dim, kv_rows, kv_rows]


def split_tensor(name: str, tensor: Tensor, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the stock tensors of one Z2all tensor (the tensor itself unless it is fused)."""
    for fused, stock_names in STOCK_PARTS.items():
        if f".{fused}." in name:
            parts = tensor.split(rows_of_parts(fused, config), dim=0)
            for stock, part in zip(stock_names, parts, strict=True):
                yield name.replace(fused, stock), part
            return
    yield name, tensor
