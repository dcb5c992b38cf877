"""Parameter counts compared with a Hugging Face model, and both FLOP conventions with values calculated by hand."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from z2all_ds.base.accounting import (
    ModelShape,
    count_matmul_parameters,
    count_parameters,
    flops_per_token,
    mfu,
    peak_flops,
)
from z2all_ds.base.errors import ConfigError

Z2ALL_1B = ModelShape(
    vocab_size=64320, hidden_size=2048, intermediate_size=5632, num_layers=22, num_heads=32, num_kv_heads=8
)


def test_z2all_1b_has_1255_million_parameters() -> None:
    counts = count_parameters(Z2ALL_1B)
    assert round(counts.total / 1e6, 1) == 1255.5
    assert counts.embedding == counts.head == 64320 * 2048
    assert counts.norms == 45 * 2048


def test_flops_per_token_of_both_conventions() -> None:
    assert round(flops_per_token(Z2ALL_1B, 2048, "origin") / 1e9, 2) == 8.64
    # The matrices of 22 layers and the head; attention is counted over the causal half of the positions.
    matmul = 22 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 5632) + 64320 * 2048
    assert flops_per_token(Z2ALL_1B, 2048, "exact") == 6 * matmul + 6 * 22 * 2048 * 2048


def test_a_tied_head_adds_no_parameters_but_counts_as_a_matmul() -> None:
    tied = ModelShape(100, 8, 16, 2, 2, 1, tie_embeddings=True)
    untied = ModelShape(100, 8, 16, 2, 2, 1)
    assert count_parameters(untied).total - count_parameters(tied).total == 800
    assert count_matmul_parameters(tied) == count_matmul_parameters(untied)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    return ModelShape(
        vocab_size=draw(st.integers(1, 50)),
        hidden_size=num_heads * 2 * draw(st.integers(1, 4)),
        intermediate_size=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        tie_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None)
@given(shapes())
def test_parameter_counts_equal_those_of_hugging_face(shape: ModelShape) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.tie_embeddings,
        attention_bias=shape.attention_bias,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.tie_weights()
    parameters = dict(model.named_parameters())  # lists a shared tensor only once
    counts = count_parameters(shape)

    def numel_of(part: str) -> int:
        return sum(value.numel() for name, value in parameters.items() if part in name)

    assert counts.total == sum(value.numel() for value in parameters.values())
    assert counts.embedding == numel_of("embed_tokens")
    assert counts.attention == numel_of("self_attn")
    assert counts.mlp == numel_of("mlp")
    assert counts.norms == numel_of("norm")
    assert counts.head == numel_of("lm_head")
    matrices = [value.numel() for name, value in parameters.items() if value.dim() == 2 and "embed" not in name]
    head_shared = shape.vocab_size * shape.hidden_size if shape.tie_embeddings else 0
    assert count_matmul_parameters(shape) == sum(matrices) + head_shared


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A800 80GB PCIe", 312e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        # GPUs with similar names but different peaks, which are not in the table.
        ("NVIDIA H100 NVL", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("Tesla V100-PCIE-16GB", None),
        ("", None),
    ],
)
def test_peak_flops_of_gpus_by_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_mfu_matches_the_published_a800_run() -> None:
    """The published MFU is 57.47 %, for 65,536 tokens in 3.17 s on one A800."""
    value = mfu(65536 / 3.17, flops_per_token(Z2ALL_1B, 2048, "origin"), peak_flops("NVIDIA A800-SXM4-80GB"))
    assert value == pytest.approx(0.5747, abs=0.003)
    assert mfu(1.0, 1.0, peak_flops("unheard of")) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"num_layers": 0}, "num_layers = 0"), ({"num_heads": 3}, "num_heads = 3"), ({"num_kv_heads": 5}, "num_kv_heads")],
)
def test_impossible_shapes_are_refused(changes: dict[str, int], named: str) -> None:
    shape = ModelShape(vocab_size=9, hidden_size=8, intermediate_size=4, num_layers=1, num_heads=4, num_kv_heads=2)
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(shape, **changes)  # type: ignore[arg-type]


def test_an_unknown_flop_convention_and_a_zero_sequence_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="origin, exact"):
        flops_per_token(Z2ALL_1B, 2048, "palm")
    with pytest.raises(ConfigError, match="sequence_length = 0"):
        flops_per_token(Z2ALL_1B, 0)


def test_modules_used_on_login_nodes_do_not_import_torch() -> None:
    program = (
        "import sys, z2all_ds.base.accounting, z2all_ds.base.machine, z2all_ds.plan;"
        "import z2all_ds.cluster.doctor, z2all_ds.cluster.hostfile;"
        "print([name for name in ('torch', 'deepspeed', 'transformers', 'rich') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
