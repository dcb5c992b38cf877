"""Causal grouped-query attention over [batch, heads, tokens, head size].

Contract: `attention(q, k, v, mask, scale, dropout)`; k and v have num_key_value_heads, q has num_attention_heads;
`mask` is None for plain causal attention over equally long q and k, or boolean [batch, 1, tokens of q, tokens of k],
True where attention is allowed (documents, padding, cached keys).
"""

import torch
from torch import Tensor
from torch.nn import functional

from z2all_ds.ops.registry import backend


@backend("attention", "sdpa")
def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's scaled_dot_product_attention; torch picks flash, cuDNN, memory-efficient or math by itself."""
    groups = q.shape[1] // k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
    )


@backend("attention", "eager")
def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float = 0.0) -> Tensor:
    """The reference: the formula as it stands, softmax in fp32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores_BHQK = torch.matmul(q, k.transpose(-1, -2)) * scale
    if mask is None:
        mask = torch.ones(scores_BHQK.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores_BHQK = scores_BHQK.masked_fill(~mask, torch.finfo(scores_BHQK.dtype).min)
    weights_BHQK = functional.softmax(scores_BHQK, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
        q.dtype
    )
    return torch.matmul(functional.dropout(weights_BHQK, dropout), v)
