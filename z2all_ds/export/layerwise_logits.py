"""Logits of a model that need not fit into memory: each block's weights are read, used and dropped, one after another.

Used on both sides of an export's proof, by a script that must not import this package too: so this file imports none
of it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

EMBEDDING = "model.embed_tokens.weight"


def layerwise_logits(model: Any, read: Callable[[str], Tensor], texts: list[list[int]]) -> Iterator[Tensor]:
    """Logits [T, V] of each text's tokens, by a causal model of Llama's structure that was built without memory (under
    `torch.device("meta")`); `read` gives a weight by its name in this model.

    All texts go through together, or the weights would have to be read once for each. Shorter ones are filled up at
    their end, which no token before it sees.
    """
    model.eval()
    blocks = {"model.embed_tokens": model.model.embed_tokens, "model.norm": model.model.norm}
    blocks |= {f"model.layers.{number}": layer for number, layer in enumerate(model.model.layers)}
    hooks = []
    for name, block in blocks.items():
        fill = _filling(name, read)
        hooks += [block.register_forward_pre_hook(fill), block.register_forward_hook(_empty)]
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


def _filling(name: str, read: Callable[[str], Tensor]) -> Callable[[nn.Module, Any], None]:
    def fill(block: nn.Module, _inputs: Any) -> None:
        block.load_state_dict({key: read(f"{name}.{key}") for key in block.state_dict()}, assign=True)

    return fill


def _empty(block: nn.Module, _inputs: Any, _outputs: Any) -> None:
    block.to("meta")
