"""Embedding lookup, whose gradient is added to a sink exactly, except for the padding row."""

import pytest
import torch
from torch.nn import functional

from tests.ops.comparing import devices, small_integers
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.embedding import embedding

IDS = torch.tensor([[3, 0, 3, 1], [3, 5, 0, 3]])
"""Token ids: some occur several times, some never."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("device", devices())
def test_sink_gets_the_exact_sum_of_two_batches(device: str, padding: int | None, dtype: str) -> None:
    ids = IDS.to(device)
    weight = small_integers(6, 5, dtype=dtype, device=device).requires_grad_()
    sink = torch.full((6, 5), 2.0, device=device)
    gradient_sink.attach(weight, sink)
    wanted = torch.full((6, 5), 2.0, dtype=torch.float64)
    for batch in range(2):
        way = small_integers(2, 4, 5, dtype=dtype, device=device, seed=1 + batch)
        out = embedding(ids, weight, padding)
        assert torch.equal(out, functional.embedding(ids, weight))
        (out * way).sum().backward()
        for place, token in enumerate(IDS.flatten().tolist()):
            if token != padding:
                wanted[token] += way.double().cpu().flatten(0, 1)[place]
    assert torch.equal(sink.double().cpu(), wanted)
    assert weight.grad is None


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("device", devices())
def test_sink_equals_the_gradient_of_autograd(device: str, padding: int | None) -> None:
    ids = IDS.to(device)
    plain, sunk = (small_integers(6, 5, dtype="fp32", device=device).requires_grad_() for _ in range(2))
    sink = torch.zeros(6, 5, device=device)
    gradient_sink.attach(sunk, sink)
    for weight in (plain, sunk):
        embedding(ids, weight, padding).pow(2).sum().backward()
    assert plain.grad is not None
    assert torch.equal(sink, plain.grad)


@pytest.mark.parametrize("device", devices())
def test_nan_shows_in_the_sink(device: str) -> None:
    weight = small_integers(6, 5, dtype="bf16", device=device).requires_grad_()
    sink = torch.zeros(6, 5, device=device)
    gradient_sink.attach(weight, sink)
    way = torch.ones(2, 4, 5, device=device)
    way[1, 1, 2] = float("nan")
    (embedding(IDS.to(device), weight, None) * way).sum().backward()
    assert sink.isnan().nonzero().tolist() == [[5, 2]]


def test_the_output_requires_no_gradient_under_no_grad() -> None:
    weight = small_integers(6, 5, dtype="fp32", device="cpu").requires_grad_()
    gradient_sink.attach(weight, torch.zeros(6, 5))
    with torch.no_grad():
        out = embedding(IDS, weight, 0)
    assert torch.equal(out, weight.detach()[IDS])
    assert not out.requires_grad


def test_gradients_are_the_derivatives() -> None:
    """The sink equals the gradient without a sink, which gradcheck can verify."""
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    sink = torch.zeros(6, 5, dtype=torch.float64)
    gradient_sink.attach(weight, sink)
    embedding(IDS, weight, None).pow(3).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: embedding(IDS, w, None).pow(3).sum(), (plain,))
    (wanted,) = torch.autograd.grad(embedding(IDS, plain, None).pow(3).sum(), plain)
    # fp64; a row that occurs four times is summed in a different order.
    assert (sink - wanted).abs().max() <= 8 * torch.finfo(torch.float64).eps * wanted.abs().max()
