"""Comparison of a backend with its op's reference, for results and gradients. The reference in fp64 is the true value.

The error is the largest difference divided by the largest true entry, in units of the dtype's rounding step. So a
tolerance is a number of roundings, and the reference in fp32 and bf16 must meet it like every other backend. Inputs are
about 1, so for a true result below 1 (for example a gradient that cancels to 0) the difference is divided by 1.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from z2all_ds.ops import Situation
from z2all_ds.ops.registry import backends_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BACKENDS_ON_CPU = {"attention": ("sdpa", "eager"), "cross_entropy": ("chunked", "torch")}

on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
)


def cases(op: str) -> list[Any]:
    """Return (backend, device) pairs: on the CPU the backends that run there, on a GPU all."""
    on_cpu = BACKENDS_ON_CPU.get(op, ("torch",))
    return [
        *(pytest.param(name, "cpu", id=f"{name}-cpu") for name in on_cpu),
        *(pytest.param(name, "cuda", id=f"{name}-cuda", marks=on_gpu) for name in backends_of(op)),
    ]


def devices() -> list[Any]:
    """Return the devices, for tests of functions without backends."""
    return [pytest.param("cpu"), pytest.param("cuda", marks=on_gpu)]


def function_of(op: str, name: str, device: str, dtype: str = "fp32", head_dim: int = 64) -> Callable[..., Any]:
    """Return the backend's function; skip the test if the backend reports that it cannot run."""
    found = backends_of(op)[name]
    refusal = found.why_not(Situation(device, dtype, head_dim))
    if refusal:
        pytest.skip(f"{op} {name}: {refusal}")
    return found.function


def results_and_gradients(call: Callable[..., Any], leaves: list[Tensor]) -> list[Any]:
    """Return the outputs of `call`, then the leaves' gradients of a fixed random projection of the outputs."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = call(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(11)
    directions = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    pairs = [(out, way) for out, way in zip(outputs, directions, strict=True) if out.requires_grad]
    # A sum of products, not backward(directions): some kernels overwrite the gradient that they receive.
    torch.stack([(out * way).sum().double() for out, way in pairs]).sum().backward()
    return [*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)]


def assert_within_roundings(
    call: Callable[..., object],
    reference_call: Callable[..., object],
    leaves: list[Tensor],
    allowed: dict[str, float],
) -> None:
    """Assert that `call` on the leaves agrees with `reference_call` on the same values in fp64 on the CPU.

    If the leaves have several dtypes, the first one determines the rounding step.
    """
    found = results_and_gradients(call, leaves)
    truth = results_and_gradients(reference_call, [leaf.double().cpu() for leaf in leaves])
    assert len(found) == len(truth)
    dtype = leaves[0].dtype
    roundings = next(count for name, count in allowed.items() if DTYPES[name] == dtype)
    for index, (have, want) in enumerate(zip(found, truth, strict=True)):
        assert have.shape == want.shape
        off = (have.double().cpu() - want).abs().max() / want.abs().max().clamp_min(1.0) / torch.finfo(dtype).eps
        # NaN fails too.
        assert off <= roundings, f"tensor {index}: {off:.2f} roundings off, allowed {roundings}"


def random(*shape: int, dtype: str, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normal values, drawn on the CPU so that every device gets the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DTYPES[dtype]).to(device)


def small_integers(*shape: int, dtype: str, device: str, seed: int = 0) -> Tensor:
    """Return integers from -8 to 8: exact in bf16, and sums of their products are exact in fp32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(DTYPES[dtype]).to(device)
