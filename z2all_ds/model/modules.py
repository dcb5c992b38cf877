"""The modules of a Z2all layer. They hold weights under names close to Llama's; the ops do the computation.

Shapes: B batch, T tokens, D hidden size, H heads, E head size, F intermediate size. An op that uses a weight is called
by the module that owns the weight: ZeRO-3 gathers a weight around the forward pass of its own module.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from z2all_ds.model.configuration_z2all import Z2allConfig
from z2all_ds.model.recompute import recompute
from z2all_ds.ops import Ops
from z2all_ds.ops.embedding import embedding
from z2all_ds.ops.visibility import Visible


class RMSNorm(nn.Module):
    """The norm before each half of a layer, fused with the residual sum of the previous half."""

    def __init__(self, hidden_size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps
        self.ops = ops

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (normed, stream): the stream is x + residual, or x if there is no residual."""
        normed, stream = self.ops.rms_norm(x_BTD, residual_BTD, self.weight, self.eps)
        return normed, stream


class Embedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.padding_idx)


class Linear(nn.Linear):
    """A matrix product by the selected backend."""

    def __init__(self, in_features: int, out_features: int, bias: bool, ops: Ops) -> None:
        super().__init__(in_features, out_features, bias)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ops.linear(x, self.weight, self.bias)
        return out


class GatedLinear(Linear):
    """The product after silu(gate) * up; its input is gate | up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self.ops.swiglu(gate_up, self.weight, self.bias, self.ops.linear)
        return out


class Head(nn.Linear):
    """Returns logits or, given labels, their losses without keeping the logits."""

    def __init__(self, hidden_size: int, vocab_size: int, ops: Ops) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.ops = ops

    def forward(  # type: ignore[override] # with labels it returns two
        self, hidden: Tensor, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if labels is None:
            return functional.linear(hidden, self.weight)
        total, losses = self.ops.cross_entropy(hidden.flatten(0, -2), self.weight, labels.flatten())
        return total, losses.view(labels.shape)


class Attention(nn.Module):
    """Grouped-query attention with one product for q, k and v."""

    def __init__(self, config: Z2allConfig, layer_index: int, ops: Ops) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dropout = config.attention_dropout
        self.ops = ops
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, config.attention_bias, ops)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, config.attention_bias, ops)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor], visible: Visible, cache: Cache | None) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        heads_BTHE = self.qkv_proj(x_BTD).view(batch, tokens, -1, self.head_dim)
        q, k, v = self.ops.rope(heads_BTHE, self.num_heads, self.num_kv_heads, *rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_index)
        dropout = self.dropout if self.training else 0.0
        mixed_BHTE = self.ops.attention(q, k, v, visible, self.head_dim**-0.5, dropout)
        out: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, config: Z2allConfig, ops: Ops) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, ops)
        self.down_proj = GatedLinear(config.intermediate_size, config.hidden_size, config.mlp_bias, ops)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x_BTD))
        return out


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward, each preceded by a norm.

    A layer returns its last contribution and the stream separately: the next norm adds them in the same pass.
    """

    def __init__(self, config: Z2allConfig, layer_index: int, ops: Ops) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_index, ops)
        self.mlp = FeedForward(config, ops)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.dropout1, self.dropout2 = config.dropout1, config.dropout2
        self.draws_random_numbers = bool(config.attention_dropout or config.dropout1 or config.dropout2)
        self.recomputed_parts: frozenset[str] = frozenset()
        """Halves ("attention", "mlp") recomputed in the backward pass; set by `recompute.set_recompute`."""

    def forward(
        self,
        x_BTD: Tensor,
        stream_BTD: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        visible: Visible,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor]:
        # No recomputation with a cache: its keys would be added twice.
        again = self.recomputed_parts if self.training and cache is None else ()
        draws = self.draws_random_numbers
        if "attention" in again:
            inputs = (x_BTD, stream_BTD, rotation, visible, None)
            x_BTD, stream_BTD = recompute(self.attention_half, *inputs, draws_random_numbers=draws)
        else:
            x_BTD, stream_BTD = self.attention_half(x_BTD, stream_BTD, rotation, visible, cache)
        if "mlp" in again:
            x_BTD, stream_BTD = recompute(self.mlp_half, x_BTD, stream_BTD, draws_random_numbers=draws)
            return x_BTD, stream_BTD
        return self.mlp_half(x_BTD, stream_BTD)

    def attention_half(
        self,
        x_BTD: Tensor,
        stream_BTD: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        visible: Visible,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor]:
        normed, stream_BTD = self.input_layernorm(x_BTD, stream_BTD)
        return self._drop(self.self_attn(normed, rotation, visible, cache), self.dropout1), stream_BTD

    def mlp_half(self, x_BTD: Tensor, stream_BTD: Tensor) -> tuple[Tensor, Tensor]:
        normed, stream_BTD = self.post_attention_layernorm(x_BTD, stream_BTD)
        return self._drop(self.mlp(normed), self.dropout2), stream_BTD

    def _drop(self, x: Tensor, share: float) -> Tensor:
        return functional.dropout(x, share, self.training) if share else x
