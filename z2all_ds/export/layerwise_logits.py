"""Computes logits of a model that may not fit into memory: weights are read, used and dropped block by block.

Both sides of an export's verification use it. One of them must not import this package, so this file imports nothing
from it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor]
"""Returns a weight by its name in the model."""
EMBEDDING = "model.embed_tokens.weight"


def layerwise_logits(model: Any, read: Read, texts: list[list[int]]) -> Iterator[Tensor]:
    """Yield the logits [T, V] of each text, for a Llama-structure model built under `torch.device("meta")`.

    All texts are processed together, so that each weight is read once. Shorter texts are padded on the right, where
    causal attention hides the padding.
    """
    model.eval()
    blocks = {"model.embed_tokens": model.model.embed_tokens, "model.norm": model.model.norm}
    blocks |= {f"model.layers.{number}": layer for number, layer in enumerate(model.model.layers)}
    hooks = []
    for name, block in blocks.items():
        hooks += [block.register_forward_pre_hook(partial(_fill, name, read)), block.register_forward_hook(_empty)]
    ids_NT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, ids in zip(ids_NT, texts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    try:
        with torch.no_grad():
            hidden_NTD = model.model(ids_NT, use_cache=False).last_hidden_state
            is_tied = model.config.tie_word_embeddings
            model.lm_head.load_state_dict({"weight": read(EMBEDDING if is_tied else "lm_head.weight")}, assign=True)
            for hidden_TD, ids in zip(hidden_NTD, texts, strict=True):
                yield model.lm_head(hidden_TD[: len(ids)])
    finally:
        for hook in hooks:
            hook.remove()
        model.lm_head.to("meta")


def _fill(name: str, read: Read, block: nn.Module, _inputs: Any) -> None:
    block.load_state_dict({key: read(f"{name}.{key}") for key in block.state_dict()}, assign=True)


def _empty(block: nn.Module, _inputs: Any, _outputs: Any) -> None:
    block.to("meta")
