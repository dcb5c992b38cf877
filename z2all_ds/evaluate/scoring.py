"""Losses of a model on windows of tokens: in batches of similar length, with bounded memory for the logits."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from z2all_ds.evaluate.loading import LoadedModel
from z2all_ds.evaluate.windows import Window

BATCHES_SORTED = 32
"""Windows of this many batches are sorted by length together, so that little padding is needed."""
LOGITS_AT_A_TIME = 1 << 26
"""Number of fp32 logits at a time: 256 MiB."""
PLAIN_HEADS = ("llama", "z2all", "mistral", "qwen2", "qwen3")
"""Model types whose logits are only the product of the head, so that it can be computed piece by piece."""


def score(loaded: LoadedModel, windows: Iterable[Window], batch: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each window's index and the losses of its counted tokens (nats, fp64), not in the order of the windows.

    Padding is masked, so the batch size affects only rounding.
    """
    source = enumerate(windows)
    while group := sorted(islice(source, batch * BATCHES_SORTED), key=lambda one: len(one[1].ids), reverse=True):
        for start in range(0, len(group), batch):
            indices, some = zip(*group[start : start + batch], strict=True)
            yield from zip(indices, _losses(loaded, some), strict=True)


@torch.no_grad()
def _losses(loaded: LoadedModel, windows: Sequence[Window]) -> tuple[Tensor, ...]:
    ids_BT = torch.zeros(len(windows), max(len(one.ids) for one in windows), dtype=torch.long)
    counted_BT, is_token_BT = ids_BT.bool(), ids_BT.clone()
    for row, one in enumerate(windows):
        ids_BT[row, : len(one.ids)] = torch.tensor(one.ids)
        counted_BT[row, : len(one.ids)] = torch.tensor(one.counted)
        is_token_BT[row, : len(one.ids)] = 1
    loaded.require_token(int(ids_BT.max()))
    ids_BT, counted_BT, is_token_BT = (one.to(loaded.device) for one in (ids_BT, counted_BT, is_token_BT))
    inputs = {"input_ids": ids_BT[:, :-1], "attention_mask": is_token_BT[:, :-1], "use_cache": False}
    wanted_BT, targets = counted_BT[:, 1:], ids_BT[:, 1:][counted_BT[:, 1:]]
    losses = [
        functional.cross_entropy(logits_NV.float(), some, reduction="none")
        for logits_NV, some in _logits(loaded.model, inputs, wanted_BT, targets)
    ]
    return torch.cat(losses).double().cpu().split([sum(one.counted) for one in windows])


def _logits(model: Any, inputs: dict[str, Any], wanted_BT: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits of the wanted positions with their targets, some at a time."""
    at_a_time = max(1, LOGITS_AT_A_TIME // model.get_output_embeddings().weight.shape[0])
    if model.config.model_type in PLAIN_HEADS:
        hidden_ND = model.base_model(**inputs).last_hidden_state[wanted_BT]
        for hidden, some in zip(hidden_ND.split(at_a_time), targets.split(at_a_time), strict=True):
            yield model.get_output_embeddings()(hidden), some
    else:
        logits_NV = model(**inputs).logits[wanted_BT]
        yield from zip(logits_NV.split(at_a_time), targets.split(at_a_time), strict=True)
