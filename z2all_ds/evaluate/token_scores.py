"""Log-probabilities of tokens for any kind of model: the caller provides a function from tokens to losses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from z2all_ds.evaluate.probe_rows import ProbeRow

IGNORED = -100
PIECE_TOKENS = 1024
"""Tokens whose logits are converted to fp32 at a time: a quarter of a gigabyte with a vocabulary of 64,000."""

TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""input_ids and labels, both [rows, tokens] on the host -> the loss of each label, 0 where it is IGNORED. Labels are
aligned: the label of a position is the token after it."""


def log_probabilities(
    rows: Sequence[ProbeRow], token_losses: TokenLosses, rows_per_batch: int, padding_id: int
) -> Iterator[list[float]]:
    """Yield the log-probabilities of each row's scored tokens, in the order of the rows.

    Padding is on the right, where causal attention hides it from all scored tokens. Rows of similar length are
    processed together.
    """
    by_length = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))
    found: dict[int, list[float]] = {}
    for start in range(0, len(rows), rows_per_batch):
        numbers = by_length[start : start + rows_per_batch]
        tokens = max(len(rows[number].ids) for number in numbers) - 1
        input_ids = torch.full((len(numbers), tokens), padding_id)
        labels = torch.full((len(numbers), tokens), IGNORED)
        for place, number in enumerate(numbers):
            ids, first = torch.tensor(rows[number].ids), rows[number].first_scored
            input_ids[place, : len(ids) - 1] = ids[:-1]
            labels[place, first - 1 : len(ids) - 1] = ids[first:]
        losses = token_losses(input_ids, labels).double().cpu()
        for place, number in enumerate(numbers):
            first, end = rows[number].first_scored - 1, len(rows[number].ids) - 1
            found[number] = (-losses[place, first:end]).tolist()
    yield from (found[number] for number in range(len(rows)))


def losses_of(model: Any, device: torch.device) -> TokenLosses:
    """Return the loss function of a transformers model; logits are converted to fp32 piece by piece."""

    @torch.no_grad()
    def token_losses(input_ids: Tensor, labels: Tensor) -> Tensor:
        logits_TV = model(input_ids.to(device), use_cache=False).logits.flatten(0, 1)
        targets = labels.to(device).flatten()
        pieces = [
            functional.cross_entropy(
                logits_TV[start : start + PIECE_TOKENS].float(),
                targets[start : start + PIECE_TOKENS],
                ignore_index=IGNORED,
                reduction="none",
            )
            for start in range(0, len(targets), PIECE_TOKENS)
        ]
        return torch.cat(pieces).view(labels.shape)

    return token_losses
