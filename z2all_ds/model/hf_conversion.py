"""transformers' own `save_pretrained` and `from_pretrained` under the stock Llama names.

Tells transformers how Llama's five matrices per layer become our two and back, so that a Z2all folder holds exactly
Llama's keys and any Llama folder loads. The row order is that of `stock_keys.py`, whose table is used here too.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from z2all_ds.model.stock_keys import STOCK_PARTS, rows_of_parts


def _only(tensors: Tensor | list[Tensor]) -> Tensor:
    """transformers hands over a tensor or a list of one, depending on where it comes from."""
    return tensors[0] if isinstance(tensors, list) else tensors


class FuseRows(ConversionOps):
    """Stock matrices one below the other, in the order of the source patterns."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **unused: Any
    ) -> dict[str, Any]:
        return {target_patterns[0]: torch.cat([_only(input_dict[source]) for source in source_patterns], dim=0)}

    @property
    def reverse_op(self) -> "SplitRows":
        return SplitRows()


class SplitRows(ConversionOps):
    """A fused matrix cut into stock matrices; transformers' own Chunk cuts equal parts, and q may be the largest."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        rows = rows_of_parts(source_patterns[0], kwargs["config"])
        parts = _only(input_dict[source_patterns[0]]).split(rows, dim=0)
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> FuseRows:
        return FuseRows()


def register(model_type: str) -> None:
    """For every model of this type, loaded or saved anywhere in this process."""
    converters = [WeightConverter(list(stock), fused, operations=[FuseRows()]) for fused, stock in STOCK_PARTS.items()]
    register_checkpoint_conversion_mapping(model_type, converters, overwrite=True)
