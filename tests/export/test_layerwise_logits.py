"""Tests for logits computed block by block: they equal those of the whole model, and no weights stay in memory."""

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers.models import TINY
from z2all_ds.export.layerwise_logits import layerwise_logits
from z2all_ds.model import Z2allConfig, Z2allForCausalLM

TEXTS = [[5, 6, 7, 8, 9, 10, 11], [900, 2], [3], list(range(64))]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["z2all", "llama"])
def test_logits_equal_those_of_the_whole_model(kind: str, tied: bool) -> None:
    torch.manual_seed(0)
    config = Z2allConfig.from_section(TINY.model_copy(update={"tie_word_embeddings": tied, "attention_bias": True}))
    stock = config.to_llama()
    whole = (Z2allForCausalLM(config) if kind == "z2all" else LlamaForCausalLM(stock)).eval()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases too
    with torch.device("meta"):
        empty = Z2allForCausalLM(config) if kind == "z2all" else LlamaForCausalLM(stock)
    if kind == "llama":
        empty.model.rotary_emb = type(empty.model.rotary_emb)(stock)
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        others = {n for n, p in empty.named_parameters() if not p.is_meta}
        block = name.split(".")[:3]
        assert all(other.split(".")[:3] == block for other in others), "two blocks in memory at once"
        return whole.get_parameter(name).detach().clone()

    found = list(layerwise_logits(empty, read, TEXTS))
    with torch.no_grad():
        for ids, logits in zip(TEXTS, found, strict=True):
            expected = whole(torch.tensor([ids])).logits[0]
            assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert sorted(set(asked)) == sorted(name for name, _ in whole.named_parameters())
    assert len(asked) == len(set(asked)) + tied  # a tied embedding is read a second time as the head
    assert all(parameter.is_meta for parameter in empty.parameters())
