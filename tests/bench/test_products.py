"""The matrix products of the model, compared with its layers and with the FLOP accounting."""

import pytest
import torch
from torch import nn

from tests.helpers.training import MICRO_OVERRIDES
from z2all_ds.base.accounting import count_matmul_parameters
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.products import PRODUCTS, Linear, linears_of, require_room, time_products, training_dtype
from z2all_ds.model import Z2allConfig, Z2allForCausalLM

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_linears_of_matches_the_layers_of_the_model_and_the_flop_count(num_kv_heads: int, tied: bool) -> None:
    changes = [f"model.num_key_value_heads={num_kv_heads}", f"model.tie_word_embeddings={tied}"]
    section = load_run_config(None, [*MICRO_OVERRIDES, *changes]).model
    with torch.device("meta"):
        model = Z2allForCausalLM(Z2allConfig.from_section(section))
    in_model = sorted(tuple(one.weight.shape) for one in model.modules() if isinstance(one, nn.Linear))
    linears = linears_of(section.shape)
    assert sorted((one.outputs, one.inputs) for one in linears for _ in range(one.count)) == in_model
    flops = sum(one.count * len(PRODUCTS) * one.flops_per_product(tokens=7) for one in linears)
    assert flops == 7 * 6 * count_matmul_parameters(section.shape)


def test_each_product_is_timed() -> None:
    seconds = time_products(Linear("odd", 13, 7), tokens=5, device=CPU, dtype=torch.float32)
    assert list(seconds) == list(PRODUCTS)
    assert all(value > 0 for value in seconds.values())


def test_a_product_that_exceeds_memory_is_named_in_the_error() -> None:
    huge = Linear("head", 2048, 10**12)
    with pytest.raises(MachineError, match=r"head \(4096 tokens, 2048 to 1000000000000\) needs"):
        require_room([Linear("o", 8, 8), huge], 4096, CPU, torch.float32)


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        (CPU, "auto", torch.float32),
        (CPU, "bf16", torch.float32),
        (CUDA, "auto", torch.bfloat16),
        (CUDA, "bf16", torch.bfloat16),
        (CUDA, "fp32", torch.float32),
    ],
)
def test_training_dtype_depends_on_device_and_precision(
    device: torch.device, precision: str, expected: torch.dtype
) -> None:
    assert training_dtype(device, precision) == expected
