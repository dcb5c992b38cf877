"""Gradients added up by the products themselves, under DeepSpeed's own step: same training, only less work."""

import pytest
import torch

from tests.zero.engines import tiny_engine, train
from z2all_ds.ops import gradient_sink
from z2all_ds.zero.gradient_sinks import GradientSinks

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
BF16 = ("deepspeed=zero1", "train.precision=bf16")


def test_losses_and_norms_are_those_of_deepspeeds_own_accumulation() -> None:
    found = []
    for with_sinks in (False, True):
        with tiny_engine("cpu", *BF16) as (engine, _):
            sinks = GradientSinks(engine) if with_sinks else None
            assert sinks is None or sinks.active
            found.append((train(engine, 4), engine.get_global_grad_norm()))
    (plain, plain_norm), (sunk, sunk_norm) = found
    # DeepSpeed rounds every micro-batch's gradient to bf16 before it adds, and the sum once more before the step: eight
    # bits of each, which over four steps show in the fourth digit of the loss (seen: 6e-5).
    assert sunk == pytest.approx(plain, rel=1e-3)
    assert float(sunk_norm) == pytest.approx(float(plain_norm), rel=0.02)
    assert plain[-1] < plain[0] - 0.05


def test_every_weight_has_its_place_in_the_flat_gradient() -> None:
    with tiny_engine("cpu", *BF16) as (engine, _):
        GradientSinks(engine)
        train(engine, 1, micro_batches=3)  # not yet a step: gradients are there
        flat = engine.optimizer.fp32_groups_gradients_flat
        begins = [tensor.data_ptr() for tensor in flat]
        ends = [tensor.data_ptr() + tensor.numel() * 4 for tensor in flat]
        for name, weight in engine.module.named_parameters():
            sink = gradient_sink.sink_of(weight)
            assert sink is not None, name
            assert sink.count_nonzero() > 0, name
            # On a CPU the norms are torch's: their gradients come through autograd, and DeepSpeed adds them up.
            assert (weight.grad is None) == ("norm" not in name), name
            assert any(b <= sink.data_ptr() < e for b, e in zip(begins, ends, strict=True)), name
        in_sinks = [int(gradient_sink.sink_of(weight).count_nonzero()) for weight in engine.module.parameters()]
        in_flat = [int(tensor.count_nonzero()) for tensor in flat]
        assert sum(in_flat) == sum(in_sinks)


def test_after_a_step_the_sinks_are_empty_again() -> None:
    with tiny_engine("cpu", *BF16) as (engine, _):
        GradientSinks(engine)
        before = [weight.detach().clone() for weight in engine.module.parameters()]
        train(engine, 1)
        assert all(gradient_sink.sink_of(weight).count_nonzero() == 0 for weight in engine.module.parameters())
        changed = [not torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)]
        assert sum(changed) > len(changed) // 2  # a norm's 1.0 may round back to itself in bf16


@pytest.mark.parametrize("deepspeed", ["zero1", "zero2", "zero3"])
def test_elsewhere_nothing_is_attached(deepspeed: str) -> None:
    with tiny_engine("cpu", f"deepspeed={deepspeed}") as (engine, _):  # fp32 on a CPU
        assert not GradientSinks(engine).active
        assert all(gradient_sink.sink_of(weight) is None for weight in engine.module.parameters())
        assert train(engine, 3)[-1] > 0
