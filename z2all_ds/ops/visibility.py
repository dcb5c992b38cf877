"""Which keys a query may attend to: causal order, documents packed into one sequence, padding, keys from a cache.

One object per forward pass. Each attention backend uses the form it needs: nothing (plain causal), a boolean mask,
document boundaries or a block mask; each form is created once and shared by the layers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Visible:
    """Visibility for `tokens` queries per row, after `seen` keys of a cache."""

    batch: int
    tokens: int
    device: torch.device
    seen: int = 0
    document_ids: Tensor | None = None
    """[batch, tokens]: attention is limited to equal ids. They increase along a row: documents are contiguous."""
    padding: Tensor | None = None
    """Boolean [batch, seen + tokens], False for padding keys; None if there is no padding."""
    cu_seqlens: Tensor | None = None
    """int32: start of each document in the flattened tokens, then the number of tokens; ends may repeat."""
    max_document: int = 0
    """Upper bound of the longest document; 0 if not counted."""
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def plain_causal(self) -> bool:
        """Whether only the causal mask is needed."""
        return self.seen == 0 and self.padding is None and not self.has_documents

    @property
    def has_documents(self) -> bool:
        return self.document_ids is not None or self.cu_seqlens is not None

    @property
    def documents_only(self) -> bool:
        """Causal inside documents, no cache, no padding: the case of variable-length kernels."""
        return self.has_documents and self.seen == 0 and self.padding is None

    def mask(self) -> Tensor | None:
        """Return boolean [batch, 1, tokens, seen + tokens], True where attention is allowed; None for plain causal."""
        if not self.plain_causal and "mask" not in self._made:
            self._made["mask"] = self._make_mask()
        return self._made.get("mask")

    def boundaries(self) -> tuple[Tensor, int]:
        """Return (cu_seqlens, upper bound of the longest document). Counting here synchronizes with the device."""
        if self.cu_seqlens is None and "borders" not in self._made:
            self._made["borders"] = document_borders(self._documents())
        borders = self._made["borders"] if self.cu_seqlens is None else self.cu_seqlens
        return borders, self.max_document or self.tokens

    def block_mask(self) -> Any:
        """Return the mask for flex attention: the blocks of 128 x 128 that have allowed entries."""
        if "block_mask" not in self._made:
            from torch.nn.attention.flex_attention import create_block_mask

            documents = self._documents()

            def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (documents[b, q] == documents[b, k])

            self._made["block_mask"] = create_block_mask(
                allowed, self.batch, None, self.tokens, self.tokens, device=str(self.device)
            )
        return self._made["block_mask"]

    def _documents(self) -> Tensor:
        """Return ids [batch, tokens], also if only the boundaries are known."""
        if self.document_ids is not None:
            return self.document_ids
        if self.cu_seqlens is None:
            return torch.zeros(self.batch, self.tokens, dtype=torch.int32, device=self.device)
        places = torch.arange(self.batch * self.tokens, dtype=self.cu_seqlens.dtype, device=self.device)
        return torch.searchsorted(self.cu_seqlens, places, right=True).view(self.batch, self.tokens)

    def _make_mask(self) -> Tensor:
        keys = torch.arange(self.seen + self.tokens, device=self.device)
        queries = keys[self.seen :, None]
        allowed = (keys[None, :] <= queries)[None, None].expand(self.batch, 1, self.tokens, self.seen + self.tokens)
        if self.has_documents:
            assert self.seen == 0, "packed documents have no cache"
            documents = self._documents()
            allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
        if self.padding is not None:
            # A padded query may attend to itself, so that its softmax is not empty; its output is not used.
            allowed = (allowed & self.padding[:, None, None, :]) | (keys[None, :] == queries)
        return allowed


BORDERS_MULTIPLE = 16
"""In training, document boundaries are padded to lengths of 16, 32 ...: few shapes, as a CUDA graph serves one shape.
Kernels pay for the added empty documents: with 64 on an H200, 2 x 2048 tokens, a backward pass takes 0.40 ms instead of
0.32."""


def document_borders(document_ids: Tensor, multiple: int = 1) -> Tensor:
    """Return cu_seqlens of [batch, tokens]; a row starts a new document. Length - 1 is a multiple of `multiple`.

    With a fixed set of lengths, a captured CUDA graph can serve many batches; the added documents are empty.
    """
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten().to(torch.int32)
    missing = -len(starts) % multiple
    ends = torch.full((missing + 1,), document_ids.numel(), dtype=torch.int32, device=document_ids.device)
    return torch.cat((starts, ends))
