"""`save_pretrained` and `from_pretrained` of transformers with the stock Llama names.

Registers with transformers how Llama's five matrices per layer map to the two fused ones, so that a Z2all folder has
exactly Llama's keys and any Llama folder loads. The row order is that of `stock_keys.py`, whose table is used here too.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from z2all_ds.model.stock_keys import STOCK_PARTS, rows_of_parts


def _only(tensors: Tensor | list[Tensor]) -> Tensor:
    """Return the tensor; transformers passes a tensor or a list of one."""
    return tensors[0] if isinstance(tensors, list) else tensors


class FuseRows(ConversionOps):
    """Concatenates stock matrices in the order of the source patterns."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **unused: Any
    ) -> dict[str, Any]:
        return {target_patterns[0]: torch.cat([_only(input_dict[source]) for source in source_patterns], dim=0)}

    @property
    def reverse_op(self) -> "SplitRows":
        return SplitRows()


class SplitRows(ConversionOps):
    """Splits a fused matrix into stock matrices; transformers' Chunk only makes equal parts, and q may be larger."""

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
    """Register the conversion for every model of this type that this process loads or saves."""
    converters = [WeightConverter(list(stock), fused, operations=[FuseRows()]) for fused, stock in STOCK_PARTS.items()]
    register_checkpoint_conversion_mapping(model_type, converters, overwrite=True)
