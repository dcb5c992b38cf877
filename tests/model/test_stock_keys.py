"""Fused weights split into stock Llama tensors, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from tests.helpers.stock_names import to_stock
from tests.model.pairs import SHAPES, tiny_config, tiny_model
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.stock_keys import split_tensor


@st.composite
def configs(draw: st.DrawFn) -> Z2allConfig:
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * groups
    return tiny_config(
        vocab_size=11,
        hidden_size=heads * draw(st.sampled_from([2, 4])),
        intermediate_size=draw(st.integers(1, 9)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([None, 2, 6])),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )


@given(config=configs())
@settings(max_examples=15, deadline=None)
def test_names_and_shapes_are_those_of_llama(config: Z2allConfig) -> None:
    state = Z2allForCausalLM(config).state_dict()
    with torch.device("meta"):
        llama = LlamaForCausalLM(config.to_llama()).state_dict()
    stock = to_stock(state, config)
    assert {name: tensor.shape for name, tensor in stock.items()} == {
        name: tensor.shape for name, tensor in llama.items()
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_row_order_is_q_k_v_and_gate_up(shape: str) -> None:
    model = tiny_model(**SHAPES[shape])
    fused = model.state_dict()["model.layers.1.self_attn.qkv_proj.weight"]
    parts = dict(split_tensor("model.layers.1.self_attn.qkv_proj.weight", fused, model.config))
    assert list(parts) == [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(torch.cat(list(parts.values())), fused)
    fused = model.state_dict()["model.layers.0.mlp.gate_up_proj.weight"]
    parts = dict(split_tensor("model.layers.0.mlp.gate_up_proj.weight", fused, model.config))
    assert list(parts) == [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert torch.equal(torch.cat(list(parts.values())), fused)


def test_other_tensors_pass_through_untouched() -> None:
    tensor = torch.ones(3)
    assert list(split_tensor("model.norm.weight", tensor, tiny_config())) == [("model.norm.weight", tensor)]
