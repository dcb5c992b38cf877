"""The loss of a training step, computed without DeepSpeed from the weights of a checkpoint and given samples."""

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.helpers.checkpoints import read_weights
from z2all_ds.base.config import RunConfig
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.tokenizer import load_tokenizer


def loss_of(
    run: RunConfig, checkpoint: Path, samples: Sequence[dict[str, torch.Tensor]], rope_theta: float | None = None
) -> float:
    """Return the mean loss over the counted tokens of all samples."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    shape = run.model.model_copy(update={"rope_theta": rope_theta or run.model.rope_theta})
    token_ids = load_tokenizer(run.data.tokenizer).model_token_ids
    model = Z2allForCausalLM(Z2allConfig.from_section(shape, **token_ids))
    model.load_state_dict(read_weights(checkpoint))
    with torch.no_grad():
        losses = model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            document_ids=batch["document_ids"],
            next_tokens=batch["next_tokens"],
        ).losses
    return float(losses.double().sum() / (batch["next_tokens"] >= 0).sum())
