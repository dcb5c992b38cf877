"""Causal grouped-query attention over [batch, heads, tokens, head size].

Contract: `attention(q, k, v, visible, scale, dropout)`; q has num_attention_heads, k and v have num_key_value_heads and
may have more tokens (a cache); `visible` (`visibility.py`) defines which keys a query may attend to. All three may be
views of one fused product; only the last dimension must be contiguous.

Every backend supports all cases: what its kernel cannot do (a cache, padding, for some documents or dropout) is passed
to `sdpa` with a mask. Training in batches without padding never needs that.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from z2all_ds.base.machine import set_compile_cache
from z2all_ds.ops.registry import Situation, backend, backends_of, needs_library
from z2all_ds.ops.visibility import Visible

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TRIAL_TOKENS = 16
DOCUMENT_KERNELS = ("flash_attn", "varlen")
"""In order of preference."""


def half_precision_on_gpu(situation: Situation) -> str | None:
    """A `why_not` for tensor core kernels."""
    if situation.device != "cuda":
        return f"needs a GPU, the model is on {situation.device}"
    if situation.dtype not in HALF_DTYPES:
        return f"computes in bf16 and fp16 only, the model computes in {situation.dtype}"
    return None if torch.cuda.is_available() else "torch sees no GPU"


def tried_on_gpu(name: str) -> Callable[[Situation], str | None]:
    """Return a `why_not` that tries the kernel: supported head sizes depend on GPU, versions and build."""

    def why_not(situation: Situation) -> str | None:
        return half_precision_on_gpu(situation) or _trial(name, situation.dtype, situation.head_dim)

    return why_not


@cache
def _trial(name: str, dtype: str, head_dim: int) -> str | None:
    """Compare one forward and backward pass, two heads over one kv head, with the reference; return what failed.

    A flash-attn build for heads of 64 silently accepted heads of 96 and returned uninitialized memory.
    """
    attention = backends_of("attention")[name].function
    visible = Visible(1, TRIAL_TOKENS, torch.device("cuda"))
    # The run's random numbers must not depend on which backends were tried.
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]), torch.enable_grad():
        q, k, v = (torch.randn(1, heads, TRIAL_TOKENS, head_dim, device="cuda") for heads in (2, 1, 1))
        inputs = [x.to(HALF_DTYPES[dtype]).requires_grad_() for x in (q, k, v)]
        wanted = eager(*(x.detach().float() for x in inputs), visible, head_dim**-0.5)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about every kernel it rejects
                out = attention(*inputs, visible, head_dim**-0.5)
                out.float().sum().backward()
            torch.cuda.synchronize()
        except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            refusal = (str(error) or type(error).__name__).splitlines()[0]
            return f"does not support heads of {head_dim} in {dtype} on this machine ({refusal})"
    # bf16 has 8 bits: correct results are within a few hundredths. NaN fails too.
    if not bool((out.float() - wanted).abs().max() < 0.1):
        return f"computes heads of {head_dim} in {dtype} wrongly on this machine"
    return None


def _no_kernel_for_documents(situation: Situation) -> str | None:
    known = backends_of("attention")
    refusals = [known[name].why_not(situation) for name in DOCUMENT_KERNELS]
    return None if None in refusals else "; ".join(dict.fromkeys(filter(None, refusals)))


@cache
def _kernel_for_documents(dtype: torch.dtype, head_dim: int) -> Callable[..., Tensor]:
    name = next(name for name, known in HALF_DTYPES.items() if known == dtype)
    runs = _flash_attn_exists(Situation("cuda", name, head_dim)) is None
    return flash_attn if runs else varlen


@backend("attention", "packed", _no_kernel_for_documents)
def packed(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """The fastest per case: documents by flash_attn, or by varlen if that is missing; everything else by sdpa.

    On an H200, 8 x 2048 tokens, 32 heads of 64 over 8, microseconds per token for 22 layers, forward and backward:
    plain causal 1.94 by cuDNN, which sdpa selects there, and 2.77 by flash_attn; documents of 300 to 1000 tokens 1.8 to
    2.2 by flash_attn and 2.0 to 2.5 by varlen.
    """
    if not visible.documents_only or dropout:
        return sdpa(q, k, v, visible, scale, dropout)
    return _kernel_for_documents(q.dtype, q.shape[-1])(q, k, v, visible, scale)


@backend("attention", "sdpa")
def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's scaled_dot_product_attention; torch selects flash, cuDNN, memory-efficient or math."""
    groups = q.shape[1] // k.shape[1]
    mask = visible.mask()
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
    )


@backend("attention", "cudnn", tried_on_gpu("cudnn"))
def cudnn(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's cuDNN attention for plain causal masks; otherwise `sdpa`."""
    return _by_one_kernel("CUDNN_ATTENTION", q, k, v, visible, scale, dropout)


@backend("attention", "flash", tried_on_gpu("flash"))
def flash(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's flash attention for plain causal masks; otherwise `sdpa`, since it does not support masks."""
    return _by_one_kernel("FLASH_ATTENTION", q, k, v, visible, scale, dropout)


def _by_one_kernel(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float
) -> Tensor:
    # cuDNN does not support a single query, which would not be faster either.
    if not visible.plain_causal or visible.tokens == 1:
        return sdpa(q, k, v, visible, scale, dropout)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, kernel)):
        return sdpa(q, k, v, visible, scale, dropout)


def _varlen_exists(situation: Situation) -> str | None:
    refusal = half_precision_on_gpu(situation)
    if refusal:
        return refusal
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen (added in 2.10)"
    return tried_on_gpu("varlen")(situation)


@backend("attention", "varlen", _varlen_exists)
def varlen(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's kernel for packed documents; `sdpa` with a cache, padding or dropout."""
    if dropout or not (visible.plain_causal or visible.documents_only):
        return sdpa(q, k, v, visible, scale, dropout)
    from torch.nn.attention.varlen import varlen_attn

    borders, longest = _borders(visible)
    q_NHE, k_NHE, v_NHE = _flattened(q), _flattened(k), _flattened(v)
    out_NHE = varlen_attn(q_NHE, k_NHE, v_NHE, borders, borders, longest, longest, scale=scale, **_varlen_options())
    assert isinstance(out_NHE, Tensor)
    return _unflattened(out_NHE, visible)


@cache
def _varlen_options() -> dict[str, Any]:
    """Return options by torch version: names changed; without `enable_gqa`, fewer kv heads are supported implicitly."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


def _flash_attn_exists(situation: Situation) -> str | None:
    missing = needs_library("flash_attn", "flash-attn")
    return half_precision_on_gpu(situation) or missing(situation) or tried_on_gpu("flash_attn")(situation)


@backend("attention", "flash_attn", _flash_attn_exists)
def flash_attn(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """The flash-attn library, including packed documents; `sdpa` with a cache or padding."""
    if not (visible.plain_causal or visible.documents_only) or (dropout and not _flash_attn_drops_out(q.shape[-1])):
        return sdpa(q, k, v, visible, scale, dropout)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": True,
        # torch's own kernels check this themselves.
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if visible.plain_causal:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        out_BTHE: Tensor = flash_attn_func(*rows, **options)
        return out_BTHE.transpose(1, 2)
    borders, longest = _borders(visible)
    flat = [_flattened(x) for x in (q, k, v)]
    out_NHE: Tensor = flash_attn_varlen_func(*flat, borders, borders, longest, longest, **options)
    return _unflattened(out_NHE, visible)


@cache
def _flash_attn_drops_out(head_dim: int) -> bool:
    """Return whether this build of the library supports dropout, which is optional to shorten compilation."""
    from flash_attn import flash_attn_func

    x = torch.ones(1, TRIAL_TOKENS, 1, head_dim, dtype=torch.bfloat16, device="cuda")
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        try:
            flash_attn_func(x, x, x, dropout_p=0.5, causal=True)
        except RuntimeError:
            return False
    return True


def _flex_exists(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return f"supports the backward pass only on a GPU, the model is on {situation.device}"
    if situation.head_dim < 16:
        return f"its kernel needs heads of at least 16, heads have {situation.head_dim}"
    return needs_library("triton", "triton")(situation)


@backend("attention", "flex", _flex_exists)
def flex(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """torch's FlexAttention, compiled once, on a block mask; `sdpa` with a cache, padding or dropout."""
    if dropout or not (visible.plain_causal or visible.documents_only):
        return sdpa(q, k, v, visible, scale, dropout)
    groups = q.shape[1] // k.shape[1]
    function = _compiled_flex() if q.is_cuda else _plain_flex()
    out: Tensor = function(q, k, v, block_mask=visible.block_mask(), scale=scale, enable_gqa=groups > 1)
    return out


def _plain_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Callable[..., Any]:
    set_compile_cache()
    return torch.compile(_plain_flex())


def _borders(visible: Visible) -> tuple[Tensor, int]:
    """Return (cu_seqlens, longest) for document kernels; plain causal is one document per row."""
    if not visible.plain_causal:
        return visible.boundaries()
    ends = (visible.batch + 1) * visible.tokens
    return torch.arange(0, ends, visible.tokens, dtype=torch.int32, device=visible.device), visible.tokens


def _flattened(x_BHTE: Tensor) -> Tensor:
    """Return [B * T, H, E]; no copy if the memory layout is [B, T, H, E], as the previous ops produce it."""
    return x_BHTE.transpose(1, 2).flatten(0, 1)


def _unflattened(x_NHE: Tensor, visible: Visible) -> Tensor:
    return x_NHE.unflatten(0, (visible.batch, visible.tokens)).transpose(1, 2)


@backend("attention", "eager")
def eager(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, dropout: float = 0.0) -> Tensor:
    """The reference: the plain formula, softmax in fp32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores_BHQK = torch.matmul(q, k.transpose(-1, -2)) * scale
    mask = visible.mask()
    if mask is None:
        mask = torch.ones(scores_BHQK.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores_BHQK = scores_BHQK.masked_fill(~mask, torch.finfo(scores_BHQK.dtype).min)
    weights_BHQK = functional.softmax(scores_BHQK, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(
        q.dtype
    )
    return torch.matmul(functional.dropout(weights_BHQK, dropout), v)
