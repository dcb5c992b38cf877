"""The forward pass of a batch from the loader, for training, validation and probes."""

from typing import Any

import torch

from z2all_ds.ops.visibility import BORDERS_MULTIPLE, document_borders
from z2all_ds.train.processes.progress import Progress


class ForwardPass:
    """Moves batches to the device and runs the engine on them."""

    def __init__(self, engine: Any, document_mask: bool, progress: Progress) -> None:
        self._engine, self._document_mask, self._progress = engine, document_mask, progress

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._document_mask:
            # On the host, where the number of documents is known without synchronization.
            batch = {**batch, "cu_seqlens": document_borders(batch["document_ids"], BORDERS_MULTIPLE)}
        return {name: tensor.to(self._engine.device, non_blocking=True) for name, tensor in batch.items()}

    def __call__(self, batch: dict[str, torch.Tensor]) -> Any:
        """Return the model's outputs for a batch on the device."""
        return self._engine(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            document_ids=batch["document_ids"] if self._document_mask else None,
            cu_seqlens=batch.get("cu_seqlens"),
            next_tokens=batch["next_tokens"],
        )

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of every token of a batch on the host, for text that is not trained on."""
        self._progress.beat()
        found: torch.Tensor = self(self.to_device(batch)).losses
        return found
