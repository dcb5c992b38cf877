"""The tensors that DeepSpeed finds in a model's output; it silently ignores those it does not find."""

import torch
from torch import Tensor

from tests.helpers.models import TINY
from z2all_ds.model import Z2allConfig, Z2allForCausalLM


def tensors_deepspeed_finds(value: object) -> list[Tensor]:
    """Return the tensors by DeepSpeed's rule: it searches tuples, lists and dicts and ignores anything else."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_deepspeed_finds(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_deepspeed_finds(item)]
    return []


def test_deepspeed_finds_the_loss_in_the_output() -> None:
    model = Z2allForCausalLM(Z2allConfig.from_section(TINY, pad_token_id=0))
    ids = torch.arange(8)[None]
    output = model(ids, next_tokens=ids)
    found = tensors_deepspeed_finds(output)
    assert [tensor for tensor in found if tensor.requires_grad] == [output.loss]
