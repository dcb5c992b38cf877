"""Rotary cos and sin, compared bit for bit with transformers' LlamaRotaryEmbedding in several orders of lengths."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.model.pairs import tiny_config
from tests.ops.comparing import on_gpu
from z2all_ds.base.errors import ConfigError
from z2all_ds.model.rotary import RotaryTable

ORIGINAL_LENGTH = 32
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_LENGTH},
    "yarn-all-fields": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
ORDERS_OF_LENGTHS = {
    "short, long, short": (9, 70, 9),
    "growing": (9, 32, 33, 50, 51),
    "long first, then middle": (70, 40, 32, 31, 33),
    "one at a time across the border": tuple(range(29, 40)),
}


def rope_config(rope: str, theta: float = 10000.0) -> Any:
    """Return a config. yarn and llama3 have a field for the original length; dynamic uses `max_position_embeddings`."""
    longest = ORIGINAL_LENGTH if rope == "dynamic" else 4 * ORIGINAL_LENGTH
    return tiny_config(max_position_embeddings=longest, rope_parameters={**ROPES[rope], "rope_theta": theta})


def positions(length: int, device: str = "cpu") -> Tensor:
    """Return two rows of 7 positions, the first ending at `length` - 1, like a generation step with left padding."""
    first = torch.arange(max(0, length - 7), length)
    return torch.stack((first, (first - 2).clamp_min(0))).to(device)


def assert_as_transformers(rope: str, lengths: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    config = rope_config(rope)
    ours, theirs = RotaryTable(config), LlamaRotaryEmbedding(config).to(device)
    for length in lengths:
        position_ids = positions(length, device)
        wanted = theirs(torch.empty(0, dtype=dtype, device=device), position_ids)
        for name, have, want in zip(("cos", "sin"), ours(position_ids, dtype), wanted, strict=True):
            assert have.dtype == want.dtype == dtype
            assert torch.equal(have, want), f"{name} at length {length}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS_OF_LENGTHS)
@pytest.mark.parametrize("rope", ROPES)
def test_cos_and_sin_are_those_of_transformers(rope: str, order: str, dtype: torch.dtype) -> None:
    assert_as_transformers(rope, ORDERS_OF_LENGTHS[order], dtype, "cpu")


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize("order", ORDERS_OF_LENGTHS)
@pytest.mark.parametrize("rope", ROPES)
def test_cos_and_sin_on_a_gpu_are_those_of_transformers(rope: str, order: str) -> None:
    assert_as_transformers(rope, ORDERS_OF_LENGTHS[order], torch.float32, "cuda")


@on_gpu[0]
@on_gpu[1]
@pytest.mark.parametrize("rope", [name for name in ROPES if name != "dynamic"])
def test_rope_types_other_than_dynamic_never_synchronize_with_the_gpu(rope: str) -> None:
    table, position_ids = RotaryTable(rope_config(rope)), positions(50, "cuda")
    table(position_ids, torch.bfloat16)  # the first call moves the frequencies
    torch.cuda.set_sync_debug_mode("error")  # from here on every synchronization raises
    try:
        cos, _ = table(position_ids, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cos.isfinite().all()


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_have_values_even_if_built_on_meta(rope: str) -> None:
    config = rope_config(rope)
    with torch.device("meta"):
        table = RotaryTable(config)
    for have, want in zip(
        table(positions(9), torch.float32), RotaryTable(config)(positions(9), torch.float32), strict=True
    ):
        assert torch.equal(have, want)


def test_every_scaling_gives_different_values() -> None:
    """If scalings had no effect, the comparison with transformers would prove nothing."""
    far = {rope: RotaryTable(rope_config(rope))(positions(100), torch.float32)[0] for rope in ROPES}
    names = list(far)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            assert not torch.equal(far[first], far[second]), (first, second)


def test_only_dynamic_depends_on_the_length() -> None:
    assert [rope for rope in ROPES if RotaryTable(rope_config(rope)).length_dependent] == ["dynamic"]


def test_two_tables_do_not_share_their_longest_position() -> None:
    config = rope_config("dynamic")
    first, second = RotaryTable(config), RotaryTable(config)
    before = second(positions(40), torch.float32)[0]
    first(positions(500), torch.float32)
    assert torch.equal(second(positions(40), torch.float32)[0], before)
    assert not torch.equal(first(positions(40), torch.float32)[0], before)


def test_an_unsupported_rope_type_is_refused() -> None:
    config = tiny_config()
    config.rope_parameters["rope_type"] = "longrope"
    with pytest.raises(ConfigError, match="rope_type=longrope: Z2all supports default, linear, dynamic, yarn, llama3"):
        RotaryTable(config)
