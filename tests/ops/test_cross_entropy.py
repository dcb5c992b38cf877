"""Cross-entropy per token: against the formula, and what does not count counts exactly nothing."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import assert_within_roundings, cases, function_of, random
from z2all_ds.ops.cross_entropy import IGNORED_LABEL, reference

BACKENDS = cases("cross_entropy")
ALLOWED = {"fp32": 4.0, "bf16": 2.0}
"""Roundings: the sum of exponentials in another order, a logarithm, a difference (seen: 0.9); for bf16 logits all of it
is fp32, and the gradient is rounded once (seen: 0.3)."""
LABELS = torch.tensor([[3, IGNORED_LABEL, 0], [IGNORED_LABEL, 6, 6]])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 7), (5, 65), (33, 130)])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_against_the_reference(name: str, device: str, tokens: int, vocabulary: int, dtype: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    logits = random(2, tokens, vocabulary, dtype=dtype, device=device, scale=4.0)
    labels = torch.randint(0, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(3))
    labels[0, 0] = IGNORED_LABEL
    assert_within_roundings(
        lambda x: cross_entropy(x, labels.to(device)), lambda x: reference(x, labels), [logits], ALLOWED
    )


def test_reference_is_the_formula() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses = reference(logits, LABELS)
    for row in range(2):
        for column in range(3):
            label = LABELS[row, column].item()
            scores = logits[row, column].tolist()
            want = 0.0
            if label != IGNORED_LABEL:
                want = math.log(sum(map(math.exp, scores))) - scores[int(label)]
            # fp64 on both sides; only the order of the sum of exponentials differs.
            assert losses[row, column].item() == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_ignored_labels_give_exactly_nothing(name: str, device: str, dtype: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    logits = random(2, 3, 7, dtype=dtype, device=device).requires_grad_()
    losses = cross_entropy(logits, LABELS.to(device))
    assert isinstance(losses, Tensor)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert logits.grad is not None
    ignored = (LABELS == IGNORED_LABEL).to(device)
    assert torch.equal(losses[ignored], torch.zeros(2, device=device))
    assert torch.equal(logits.grad[ignored], torch.zeros(2, 7, dtype=logits.dtype, device=device))
    assert (losses[~ignored] > 0).all()
    assert (logits.grad[~ignored] != 0).all()


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nothing_but_ignored_labels(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    labels = torch.full((2, 3), IGNORED_LABEL, device=device)
    assert torch.equal(
        cross_entropy(random(2, 3, 7, dtype="fp32", device=device), labels), torch.zeros(2, 3, device=device)
    )


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_large_logits_do_not_overflow(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    logits = torch.tensor([[[1000.0, 0.0, -1000.0]]], device=device)
    found = [cross_entropy(logits, torch.tensor([[label]], device=device)) for label in range(3)]
    assert [loss.item() for loss in found if isinstance(loss, Tensor)] == [0.0, 1000.0, 2000.0]


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_shows_where_it_is(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    logits = random(2, 3, 7, dtype="fp32", device=device)
    logits[1, 2, 0] = float("nan")
    losses = cross_entropy(logits, LABELS.to(device))
    assert isinstance(losses, Tensor)
    assert losses.isnan().nonzero().tolist() == [[1, 2]]


def test_gradients_are_the_derivatives() -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: reference(x, LABELS), (logits,))
