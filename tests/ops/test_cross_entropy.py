"""Output head with cross-entropy: every backend compared with the formula; ignored labels contribute exactly zero."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.comparing import DTYPES, assert_within_roundings, cases, function_of, on_gpu, random, small_integers
from z2all_ds.base.errors import ConfigError
from z2all_ds.ops import cross_entropy as op
from z2all_ds.ops import gradient_sink
from z2all_ds.ops.cross_entropy import IGNORED_LABEL, chunked, reference

# Some CPUs have no bf16 matrix products; torch warns once and falls back.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

SHAPES = [
    # tokens, hidden size, vocabulary
    (1, 16, 7),
    (5, 33, 65),
    (33, 64, 130),
    (19, 24, 5003),
]
BACKENDS = cases("cross_entropy")
ON_GPU = [case for case in BACKENDS if case.values[1] == "cuda"]
ALLOWED = {"fp32": 32.0, "bf16": 4.0}
"""Tolerance in roundings. fp32: up to 64 products and 5003 exponentials are summed in a different order, then 5003
products (measured: 7). bf16: logits of up to 8 and their gradients are rounded (measured: 0.5 on CPUs, where the
gradients stay fp32)."""
LABELS = torch.tensor([3, IGNORED_LABEL, 0, IGNORED_LABEL, 6, 6])


@pytest.fixture(params=[None, 40], ids=["one-chunk", "chunks"])
def chunk_logits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the default chunk size, or make it so small that there are several chunks, the last one shorter."""
    if request.param is not None:
        monkeypatch.setattr(op, "CHUNK_LOGITS", request.param)


def head(tokens: int, size: int, vocabulary: int, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and labels; logits are about 2."""
    hidden = random(tokens, size, dtype=dtype, device=device)
    weight = random(vocabulary, size, dtype=dtype, device=device, seed=1, scale=2 * size**-0.5)
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(3))
    if tokens > 1:
        labels[0] = IGNORED_LABEL
    return hidden, weight, labels


def of_logits(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and a weight with exactly these logits; the hidden states are the identity matrix."""
    return torch.eye(logits_NV.shape[0], dtype=logits_NV.dtype, device=logits_NV.device), logits_NV.T.contiguous()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_backends_agree_with_the_reference(name: str, device: str, shape: tuple[int, int, int], dtype: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    hidden, weight, labels = head(*shape, dtype, device)
    assert_within_roundings(
        lambda h, w: cross_entropy(h, w, labels.to(device)),
        lambda h, w: reference(h, w, labels),
        [hidden, weight],
        ALLOWED,
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_chunked_agrees_with_the_reference_for_any_chunk_size(device: str, dtype: str, chunk_logits: None) -> None:
    hidden, weight, labels = head(23, 33, 11, dtype, device)
    assert_within_roundings(
        lambda h, w: chunked(h, w, labels.to(device)), lambda h, w: reference(h, w, labels), [hidden, weight], ALLOWED
    )


def test_the_reference_equals_the_formula() -> None:
    logits = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total, losses = reference(*of_logits(logits), LABELS)
    for row, label in enumerate(LABELS.tolist()):
        scores = logits[row].tolist()
        want = 0.0
        if label != IGNORED_LABEL:
            want = math.log(sum(map(math.exp, scores))) - scores[label]
        # fp64 on both sides; only the order of the sum of exponentials differs.
        assert losses[row].item() == pytest.approx(want, rel=1e-13)
    assert total.item() == pytest.approx(sum(losses.tolist()), rel=1e-13)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_losses_of_exact_logits_have_fp32_accuracy(name: str, device: str, dtype: str) -> None:
    """If logits need no rounding, losses of bf16 models are as accurate as those of fp32 models."""
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    logits = random(6, 70, dtype=dtype, device=device, scale=4.0)
    total, losses = cross_entropy(*of_logits(logits), LABELS.to(device))
    _, wanted = reference(*of_logits(logits.double().cpu()), LABELS)
    assert losses.dtype == total.dtype == torch.float32
    assert not losses.requires_grad
    # The roundings of a sum of 70 exponentials, a logarithm and a difference.
    assert (losses.double().cpu() - wanted).abs().max() <= 8 * torch.finfo(torch.float32).eps * wanted.max()
    assert total.item() == pytest.approx(wanted.sum().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_ignored_labels_have_zero_loss_and_zero_gradient(name: str, device: str, dtype: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    hidden, weight = (leaf.requires_grad_() for leaf in of_logits(random(6, 7, dtype=dtype, device=device)))
    total, losses = cross_entropy(hidden, weight, LABELS.to(device))
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    ignored = (LABELS == IGNORED_LABEL).to(device)
    assert not losses[ignored].any()
    assert not hidden.grad[ignored].any()
    # The hidden states are the identity matrix, so column n of the weight's gradient is the gradient of logits row n.
    assert not weight.grad[:, ignored].any()
    assert (losses[~ignored] > 0).all()
    assert (weight.grad[:, ~ignored] != 0).all()


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_a_batch_of_only_ignored_labels_has_zero_loss_and_gradient(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    hidden, weight, _ = head(5, 16, 7, "fp32", device)
    hidden.requires_grad_()
    total, losses = cross_entropy(hidden, weight, torch.full((5,), IGNORED_LABEL, device=device))
    assert total.item() == 0
    assert not losses.any()
    total.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_gradients_scale_with_the_incoming_gradient(name: str, device: str) -> None:
    """Gradient accumulation divides the total; a power of two makes the division exact."""
    cross_entropy = function_of("cross_entropy", name, device)
    gradients = []
    for scale in (1.0, 0.25):
        hidden, weight, labels = head(5, 33, 65, "fp32", device)
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        (cross_entropy(*leaves, labels.to(device))[0] * scale).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for full, quarter in zip(*gradients, strict=True):
        assert full is not None and quarter is not None
        assert torch.equal(full * 0.25, quarter)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_weight_gradient_goes_into_its_sink(name: str, device: str, dtype: str, chunk_logits: None) -> None:
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    hidden, weight, labels = head(23, 33, 11, dtype, device)
    weight.requires_grad_()
    cross_entropy(hidden, weight, labels.to(device))[0].backward()
    assert weight.grad is not None
    plain = weight.grad.double()
    weight.grad = None
    sink = torch.zeros(11, 33, device=device)
    gradient_sink.attach(weight, sink)
    for _ in range(2):
        cross_entropy(hidden, weight, labels.to(device))[0].backward()
    assert weight.grad is None
    # The sink has the same fp32 sum twice; without a sink, it is rounded to the weight's dtype.
    allowed = 8 * torch.finfo(torch.float32).eps + torch.finfo(DTYPES[dtype]).eps
    assert (sink.double() / 2 - plain).abs().max() <= allowed * plain.abs().max()


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_forward_and_backward_do_not_modify_the_inputs(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    hidden, weight, labels = head(5, 33, 65, "fp32", device)
    labels = labels.to(device)
    before = [x.clone() for x in (hidden, weight, labels)]
    cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels)[0].backward()
    assert all(torch.equal(x, old) for x, old in zip((hidden, weight, labels), before, strict=True))


@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_large_logits_do_not_overflow(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    logits = torch.tensor([[1000.0, 0.0, -1000.0]], device=device).expand(3, 3)
    _, losses = cross_entropy(*of_logits(logits), torch.arange(3, device=device))
    assert losses.tolist() == [0.0, 1000.0, 2000.0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_in_a_hidden_state_affects_only_its_token(name: str, device: str, dtype: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    hidden, weight, _ = head(6, 16, 7, dtype, device)
    hidden[4, 3] = float("nan")
    hidden.requires_grad_()
    total, losses = cross_entropy(hidden, weight, LABELS.to(device))
    assert losses.isnan().nonzero().tolist() == [[4]]
    assert total.isnan()
    total.backward()
    assert hidden.grad is not None
    assert hidden.grad[4].isnan().all()
    assert hidden.grad[[0, 1, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("token", [0, 4096, 4999], ids=["first", "second-block", "last"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_nan_in_a_single_logit_reaches_the_loss(name: str, device: str, dtype: str, token: int) -> None:
    """One row of the weight has a NaN; a maximum that ignores NaN would lose it."""
    cross_entropy = function_of("cross_entropy", name, device, dtype)
    hidden, weight, _ = head(6, 16, 5000, dtype, device)
    weight[token, 3] = float("nan")
    _, losses = cross_entropy(hidden, weight, LABELS.to(device))
    assert torch.equal(losses.isnan().cpu(), LABELS != IGNORED_LABEL)


@pytest.mark.parametrize("label", [7, -1, -101, 2**40])
@pytest.mark.parametrize(("name", "device"), BACKENDS)
def test_a_label_outside_the_vocabulary_is_refused_or_gives_nan(name: str, device: str, label: int) -> None:
    """A CPU refuses the label. On a GPU the check would synchronize, so the loss of that token is NaN instead."""
    cross_entropy = function_of("cross_entropy", name, device)
    hidden, weight, _ = head(6, 16, 7, "fp32", device)
    labels = LABELS.clone()
    labels[2] = label
    if device == "cpu":
        with pytest.raises(ConfigError, match=f"label {label}: must be a token id from 0 to 6, or -100"):
            cross_entropy(hidden, weight, labels)
        return
    total, losses = cross_entropy(hidden, weight, labels.to(device))
    assert losses.isnan().nonzero().tolist() == [[2]]
    assert total.isnan()


@pytest.mark.parametrize(("name", "device"), [case for case in ON_GPU if case.values[0] == "triton"])
def test_a_second_backward_pass_is_refused_if_logits_are_overwritten(name: str, device: str) -> None:
    cross_entropy = function_of("cross_entropy", name, device)
    hidden, weight, labels = head(5, 33, 65, "fp32", device)
    total, _ = cross_entropy(hidden.requires_grad_(), weight, labels.to(device))
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="only one backward pass is possible"):
        total.backward()


@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("function", [reference, chunked], ids=["reference", "chunked"])
def test_gradients_are_the_derivatives(function: object, with_sink: bool, chunk_logits: None) -> None:
    assert callable(function)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(13, 5, dtype=torch.float64, generator=generator).requires_grad_()
    if with_sink:
        gradient_sink.attach(weight, torch.zeros(13, 5, dtype=torch.float64))
        assert torch.autograd.gradcheck(lambda h: function(h, weight, LABELS)[0], (hidden,))
    else:
        assert torch.autograd.gradcheck(lambda h, w: function(h, w, LABELS)[0], (hidden, weight))


def test_chunked_and_reference_give_the_same_losses_for_exact_logits(chunk_logits: None) -> None:
    hidden, weight = (small_integers(*shape, dtype="fp32", device="cpu") / 8 for shape in ((6, 5), (13, 5)))
    # Logits are exact; both functions compute the same logarithm of a sum of 13 exponentials.
    difference = reference(hidden, weight, LABELS)[1] - chunked(hidden, weight, LABELS)[1]
    assert difference.abs().max() <= 4 * torch.finfo(torch.float32).eps
