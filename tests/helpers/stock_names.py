"""Conversion of this package's state dicts to the parameter names of Llama."""

from collections.abc import Mapping

from torch import Tensor
from transformers import LlamaConfig

from z2all_ds.model.stock_keys import split_tensor


def to_stock(state: Mapping[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    return {stock: part for name, tensor in state.items() for stock, part in split_tensor(name, tensor, config)}
