"""Gradient sinks: fp32 buffers to which a product adds its weight gradient, instead of returning it to autograd."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.ops.comparing import DTYPES, devices, random, small_integers
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.linear import reference as linear

# Some CPUs have no bf16 matrix products; torch warns once and falls back.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device", devices())
def test_product_is_added_exactly(device: str, dtype: str) -> None:
    weight = torch.zeros(33, 65, dtype=DTYPES[dtype], device=device)
    dy, x = (small_integers(300, width, dtype=dtype, device=device, seed=width) for width in (33, 65))
    sink = torch.arange(33 * 65, dtype=torch.float32, device=device).view(33, 65)
    wanted = sink.double() + dy.double().T @ x.double()
    gradient_sink.attach(weight, sink)
    assert gradient_sink.add_product(weight, dy, x) is None
    assert torch.equal(sink.double(), wanted)


@pytest.mark.parametrize("device", devices())
def test_bf16_products_are_added_in_fp32(device: str) -> None:
    """Sums of many small gradients lose almost nothing in fp32; in bf16 they would be off by several percent."""
    weight = torch.zeros(8, 16, dtype=torch.bfloat16, device=device)
    sink = torch.zeros(8, 16, device=device)
    gradient_sink.attach(weight, sink)
    wanted = torch.zeros(8, 16, dtype=torch.float64)
    for batch in range(32):
        dy, x = (random(64, width, dtype="bf16", device=device, seed=batch + width).abs() for width in (8, 16))
        gradient_sink.add_product(weight, dy, x)
        wanted += dy.double().cpu().T @ x.double().cpu()
    # 2048 products of bf16 values are exact in fp32; only their sums are rounded, at most 2048 times.
    assert ((sink.double().cpu() - wanted).abs() / wanted).max() <= 2048 * torch.finfo(torch.float32).eps


def test_without_a_sink_the_product_is_returned() -> None:
    weight = torch.zeros(3, 5, dtype=torch.bfloat16)
    dy, x = (small_integers(4, width, dtype="bf16", device="cpu", seed=width) for width in (3, 5))
    product = gradient_sink.add_product(weight, dy, x)
    assert product is not None
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, dy.T @ x)


def test_finished_gradient_is_added_or_returned_in_the_weights_dtype() -> None:
    weight = torch.zeros(5, dtype=torch.bfloat16)
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0, 257.0])
    returned = gradient_sink.add(weight, gradient)
    assert returned is not None
    assert returned.dtype == torch.bfloat16
    assert returned.tolist() == [1.0, 2.0, 3.0, 4.0, 256.0]
    sink = torch.ones(5)
    gradient_sink.attach(weight, sink)
    assert gradient_sink.add(weight, gradient) is None
    assert sink.tolist() == [2.0, 3.0, 4.0, 5.0, 258.0]


def test_a_sink_of_a_different_shape_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        gradient_sink.attach(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_under_activation_checkpointing_the_gradient_goes_into_the_sink(reentrant: bool) -> None:
    weight = small_integers(3, 4, dtype="fp32", device="cpu").requires_grad_()
    sink = torch.zeros(3, 4)
    gradient_sink.attach(weight, sink)
    x = small_integers(6, 4, dtype="fp32", device="cpu", seed=1).requires_grad_()
    checkpoint(lambda a: linear(a, weight, None), x, use_reentrant=reentrant).pow(2).sum().backward()
    y = x.detach() @ weight.detach().T
    assert torch.equal(sink, 2 * y.T @ x.detach())
    assert weight.grad is None


def test_bias_rows_are_summed_in_the_sinks_precision() -> None:
    bias = torch.zeros(1, dtype=torch.bfloat16)
    rows = torch.ones(300, 1, dtype=torch.bfloat16)
    rows[0] = 256.0
    sink = torch.zeros(1)
    gradient_sink.attach(bias, sink)
    assert gradient_sink.add_rows(bias, rows) is None
    assert sink.item() == 555.0  # rounded to bf16 it would be 556
