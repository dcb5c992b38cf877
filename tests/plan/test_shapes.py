"""Advice on model sizes, given only for sizes that cost time or memory."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from z2all_ds.base.accounting import ModelShape
from z2all_ds.base.config import load_run_config
from z2all_ds.plan.shapes import Advice, advise

GOOD = load_run_config("z2all_1b").model.shape


def settings(shape: ModelShape, micro_batch: int = 8, length: int = 2048) -> dict[str, Advice]:
    return {advice.setting: advice for advice in advise(shape, micro_batch, length)}


@pytest.mark.parametrize("preset", ["z2all_1b", "z2all_7b"])
def test_the_large_presets_get_no_advice(preset: str) -> None:
    run = load_run_config(preset)
    assert advise(run.model.shape, run.train.micro_batch, run.train.sequence_length) == []


def test_unaligned_feed_forward_and_vocabulary_sizes_get_advice() -> None:
    found = advise(replace(GOOD, vocab_size=64_321, intermediate_size=5_461), 8, 2048)
    assert [advice.setting for advice in found] == ["model.intermediate_size", "model.vocab_size"]
    feed_forward, head = found
    assert (head.now, head.better) == (64_321, 64_384)
    assert (feed_forward.now, feed_forward.better) == (5_461, 5_504)
    # The feed-forward is over half of the work and 3.7 times as slow, so most of the time is wasted.
    assert 0.5 < (feed_forward.gain or 0) < 0.73
    assert 0.2 < (head.gain or 0) < 0.45


def test_an_unaligned_hidden_size_gets_advice() -> None:
    crooked = settings(replace(GOOD, hidden_size=2046, num_heads=33, num_kv_heads=11))["model.hidden_size"]
    assert crooked.better == 2112 and crooked.better % 64 == crooked.better % 33 == 0  # heads of size 64
    assert 0.6 < (crooked.gain or 0) < 0.73
    plain = settings(replace(GOOD, hidden_size=2080, num_heads=26, num_kv_heads=26, vocab_size=64_328))
    assert (plain["model.hidden_size"].better, plain["model.hidden_size"].gain) == (2496, None)
    assert plain["model.vocab_size"].better == 64_384


def test_a_head_size_that_kernels_pad_gets_advice() -> None:
    found = settings(replace(GOOD, hidden_size=2560, num_heads=32, num_kv_heads=8, intermediate_size=6912))
    advice = found["model.num_attention_heads"]
    assert (advice.now, advice.better) == (32, 40)  # the head size changes from 80 to 64
    assert 0 < (advice.gain or 0) < 0.05


def test_tying_is_advised_for_a_large_embedding_table() -> None:
    small = replace(GOOD, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=8)
    assert "72%" in settings(small)["model.tie_word_embeddings"].reason
    assert "model.tie_word_embeddings" not in settings(replace(small, tie_embeddings=True))


def test_a_narrow_feed_forward_and_a_small_micro_batch_get_advice() -> None:
    found = settings(replace(GOOD, intermediate_size=2048), micro_batch=1, length=512)
    assert found["model.intermediate_size"].better == 5504
    assert found["train.micro_batch"].better == 8
    assert found["train.micro_batch"].gain is None


@given(
    st.integers(100, 200_000),
    st.integers(1, 64).map(lambda heads: heads * 16),
    st.integers(100, 20_000),
    st.integers(1, 64),
)
@example(100, 368, 1601, 1)
def test_advice_that_is_followed_is_not_given_again(
    vocabulary: int, hidden: int, feed_forward: int, layers: int
) -> None:
    shape = ModelShape(vocabulary, hidden, feed_forward, layers, hidden // 16, hidden // 16)
    for advice in advise(shape, 8, 2048):
        if advice.setting == "model.vocab_size":
            shape = replace(shape, vocab_size=advice.better)
        if advice.setting == "model.intermediate_size":
            shape = replace(shape, intermediate_size=advice.better)
    again = {advice.setting for advice in advise(shape, 8, 2048)}
    assert not again & {"model.vocab_size", "model.intermediate_size"}
