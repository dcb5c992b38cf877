"""The FLOP formulas compared with torch's FLOP counter during a real forward and backward pass.

torch counts matrix products as they are executed. The reference attention computes the full square of positions and
masks half of it, so the counter reports twice the attention FLOPs of the exact convention. The tests add the masked
half explicitly.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.comparing import on_gpu
from z2all_ds.base.accounting import ModelShape, flops_per_token, hardware_flops_per_token
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.recompute import set_recompute
from z2all_ds.ops import Situation, resolve_ops

BATCH, LENGTH = 2, 48
REFERENCES = {"attention": "eager", "rope": "torch", "rms_norm": "torch", "swiglu": "torch", "linear": "torch"}


def model_section(kv_heads: int, tied: bool) -> ModelSection:
    return ModelSection(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
    )


def counted_per_token(
    section: ModelSection,
    cross_entropy: str = "torch",
    checkpointing: str = "none",
    recompute: tuple[str, ...] = (),
    device: str = "cpu",
    **backends: str,
) -> float:
    """Return the FLOPs per token that torch counts in one real training pass."""
    wanted = {**REFERENCES, **backends, "cross_entropy": cross_entropy}
    dtype = "bf16" if device == "cuda" else "fp32"
    ops = resolve_ops(wanted, Situation(device, dtype, section.shape.head_dim))
    model = Z2allForCausalLM(Z2allConfig.from_section(section), ops).train()
    model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    set_recompute(model, checkpointing, recompute)
    ids = torch.randint(0, section.vocab_size, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids[:, :-1], next_tokens=ids[:, 1:]).loss.backward()
    assert model.model.embed_tokens.weight.grad is not None
    return counter.get_total_flops() / (BATCH * LENGTH)


def masked_half(shape: ModelShape, forward_passes: int = 3) -> int:
    """Return the attention FLOPs per token in the masked half; a backward pass costs as much as two forward passes."""
    return 2 * forward_passes * shape.num_layers * shape.attention_width * LENGTH


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_exact_convention_equals_the_flops_counted_by_torch(kv_heads: int, tied: bool) -> None:
    section = model_section(kv_heads, tied)
    formula = flops_per_token(section.shape, LENGTH, "exact") + masked_half(section.shape)
    # The formula covers exactly the products that are executed, so no tolerance is needed.
    assert counted_per_token(section) == formula


def test_the_origin_convention_also_counts_the_embedding_table_and_the_norms() -> None:
    section = model_section(2, False)
    table = 6 * section.vocab_size * section.hidden_size
    norms = 6 * 7 * section.hidden_size
    assert flops_per_token(section.shape, LENGTH, "origin") == counted_per_token(section) + table + norms


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_that_are_computed_twice_are_counted_twice(tied: bool) -> None:
    section = model_section(2, tied)
    formula = hardware_flops_per_token(section.shape, LENGTH, cross_entropy="chunked") + masked_half(section.shape)
    assert counted_per_token(section, cross_entropy="chunked") == formula


@pytest.mark.parametrize(
    ("checkpointing", "recompute", "last_products"),
    [
        ("full", (), ("down",)),
        ("selective", ("mlp",), ("down",)),
        ("selective", ("attention",), ("out",)),
        ("selective", ("attention", "mlp"), ("out", "down")),
    ],
)
def test_recomputed_parts_are_counted_again(
    checkpointing: str, recompute: tuple[str, ...], last_products: tuple[str, ...]
) -> None:
    """torch skips the last product of a recomputed part, since the backward pass does not need its output; the formula
    counts it (see `hardware_flops_per_token`)."""
    section = model_section(2, False)
    shape = section.shape
    product = {
        "down": 2 * shape.num_layers * shape.hidden_size * shape.intermediate_size,
        "out": 2 * shape.num_layers * shape.hidden_size * shape.attention_width,
    }
    stopped_before = sum(product[name] for name in last_products)
    attention_again = checkpointing == "full" or "attention" in recompute
    formula = hardware_flops_per_token(shape, LENGTH, checkpointing, recompute)
    square = masked_half(shape, 4 if attention_again else 3)
    counted = counted_per_token(section, checkpointing=checkpointing, recompute=recompute)
    assert counted == formula + square - stopped_before


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_triton_kernels_recompute_the_last_product(device: str) -> None:
    section = model_section(2, False)
    formula = hardware_flops_per_token(section.shape, LENGTH, "selective", ("mlp",)) + masked_half(section.shape)
    counted = counted_per_token(section, checkpointing="selective", recompute=("mlp",), device=device, swiglu="triton")
    assert counted == formula


def test_hardware_flops_are_the_exact_flops_plus_the_recomputed_parts() -> None:
    shape = model_section(2, False).shape
    exact = flops_per_token(shape, LENGTH, "exact")
    assert hardware_flops_per_token(shape, LENGTH) == exact
    assert hardware_flops_per_token(shape, LENGTH, recompute=("mlp",)) == exact  # only used with selective
    assert hardware_flops_per_token(shape, LENGTH, "full", (), "chunked") == exact + exact // 3
    head = 2 * shape.vocab_size * shape.hidden_size
    mlp = 2 * 3 * shape.num_layers * shape.hidden_size * shape.intermediate_size
    assert hardware_flops_per_token(shape, LENGTH, "full") == exact + exact // 3 - head
    assert hardware_flops_per_token(shape, LENGTH, "selective", ("mlp",)) == exact + mlp
    assert hardware_flops_per_token(shape, LENGTH, "selective", ("attention",)) == exact + exact // 3 - head - mlp
    by_parts = hardware_flops_per_token(shape, LENGTH, "selective", ("attention", "mlp"))
    assert by_parts == hardware_flops_per_token(shape, LENGTH, "full")
