"""`z2all bench floor`: what the matrix products and the attention of a training step cost here, and nothing else.

No step that computes these products with these libraries in this precision is faster. The distance to the floor is what
norms, rotations, the loss, the optimizer, launches and communication cost. Every pass measures all rows before any row
is repeated, because clocks sink under load; the medians are over passes. Attention is over whole sequences.
"""

import itertools
import statistics
import warnings
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from z2all_ds.base.accounting import ModelShape, flops_per_token, mfu, peak_flops
from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import progress
from z2all_ds.base.errors import MachineError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.products import PRODUCTS, linears_of, require_room, time_products, training_dtype
from z2all_ds.bench.shared import require_at_least
from z2all_ds.bench.timing import cold_passes, in_words, measured_on, require_memory, rotating, sets_needed, time_call

ROUNDS = 5
DIRECTIONS = ("forward", "backward")
ATTENTION_BACKENDS = {
    "cuda": {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}
LAST_RESORT = {"math": SDPBackend.MATH}
"""Tried where no other backend runs: it writes the whole square of positions out."""


@dataclass(frozen=True)
class FloorRow:
    """One kind of call, `count` of them per micro-batch. Figures are of one call; attention is over the causal half."""

    name: str
    count: int
    flops: int
    milliseconds: float
    teraflops_per_second: float


@dataclass(frozen=True)
class AttentionBackend:
    """Seconds of one call in each of DIRECTIONS. A backend that does not run has the reason and no figures."""

    name: str
    failed: str
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Floor:
    """Medians of one device. The rows have the fastest attention backend; MFU is by the two conventions."""

    measured_on: dict[str, str]
    dtype: str
    micro_batch: int
    sequence_length: int
    rounds: int
    rows: list[FloorRow]
    attention_backend: str
    attention_backends: list[AttentionBackend]
    microseconds_per_token: float
    tokens_per_second: float
    mfu_origin: float | None
    mfu_exact: float | None


def measure_floor(run: RunConfig, device: torch.device, rounds: int = ROUNDS) -> Floor:
    """Measures the floor of the run's model and micro-batch on one device."""
    require_at_least(1, rounds=rounds)
    shape, dtype = run.model.shape, training_dtype(device, run.train.precision)
    micro_batch, sequence_length = run.train.micro_batch, run.train.sequence_length
    tokens = micro_batch * sequence_length
    linears = linears_of(shape)
    require_room(linears, tokens, device, dtype)
    cold = cold_passes(device)
    products, attention = [], []
    with progress("floor", total=(cold + rounds) * (len(linears) + 1), unit="shapes") as advance:
        for _ in range(cold + rounds):
            products.append(dict[str, float]())
            for linear in linears:
                for product, seconds in time_products(linear, tokens, device, dtype).items():
                    products[-1][f"{linear.name} {product}"] = seconds
                advance(1, linear.name)
            attention.append(try_attention(shape, micro_batch, sequence_length, device, dtype))
            advance(1, "attention")
    backends = _medians(attention[cold:])
    fastest = _fastest(backends)
    rows = []
    for linear, product in itertools.product(linears, PRODUCTS):
        name = f"{linear.name} {product}"
        median = statistics.median(one[name] for one in products[cold:])
        rows.append(_row(name, linear.count, linear.flops_per_product(tokens), median))
    flops = attention_flops(shape, tokens, sequence_length)
    for way in DIRECTIONS:
        rows.append(_row(f"attention {way}", shape.num_layers, flops[way], fastest.seconds[way]))
    seconds_per_token = sum(row.count * row.milliseconds for row in rows) / 1e3 / tokens
    facts = measured_on(device)
    per_token = [flops_per_token(shape, sequence_length, convention) for convention in ("origin", "exact")]
    return Floor(
        facts,
        str(dtype).removeprefix("torch."),
        micro_batch,
        sequence_length,
        rounds,
        rows,
        fastest.name,
        backends,
        seconds_per_token * 1e6,
        1 / seconds_per_token,
        *(mfu(1 / seconds_per_token, flops, peak_flops(facts["device"])) for flops in per_token),
    )


def attention_flops(shape: ModelShape, tokens: int, sequence_length: int) -> dict[str, int]:
    """Returns the operations of one layer over the causal half, without what the backward pass computes again."""
    forward = 2 * shape.attention_width * sequence_length * tokens
    return {"forward": forward, "backward": 2 * forward}


def try_attention(
    shape: ModelShape, batch: int, sequence_length: int, device: torch.device, dtype: torch.dtype
) -> list[AttentionBackend]:
    """Measures one layer's causal attention, forward and backward, with each of torch's backends."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    # In and out of both directions, about: the tensors of one forward call, and as much again for gradients.
    set_bytes = batch * sequence_length * (heads + shape.num_heads) * shape.head_dim * dtype.itemsize
    num_sets = sets_needed(set_bytes, device)
    require_memory(2 * num_sets * set_bytes, device, f"attention with {batch} × {sequence_length} tokens")

    def random(count: int) -> Tensor:
        # [B, T, heads, E] in memory, as our rope leaves it: kernels read this faster than parts of a fused tensor.
        return torch.randn(batch, sequence_length, count, shape.head_dim, device=device, dtype=dtype).transpose(1, 2)

    def random_heads() -> _Heads:
        counts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (random(count).requires_grad_() for count in counts)  # leaves: the backward is attention's alone
        return _Heads(q, k, v, random(shape.num_heads))

    sets = [random_heads() for _ in range(num_sets)]
    tries = [_try_one(name, kind, sets, device) for name, kind in ATTENTION_BACKENDS[device.type].items()]
    if all(one.failed for one in tries):
        tries += [_try_one(name, kind, sets, device) for name, kind in LAST_RESORT.items()]
    return tries


@dataclass(frozen=True)
class _Heads:
    q_BHTE: Tensor
    k_BKTE: Tensor
    v_BKTE: Tensor
    dout_BHTE: Tensor


def _attend(heads: _Heads) -> Tensor:
    grouped = heads.q_BHTE.shape[1] != heads.k_BKTE.shape[1]
    return F.scaled_dot_product_attention(heads.q_BHTE, heads.k_BKTE, heads.v_BKTE, is_causal=True, enable_gqa=grouped)


def _differentiate(graph: tuple[_Heads, Tensor]) -> object:
    heads, out = graph
    leaves = (heads.q_BHTE, heads.k_BKTE, heads.v_BKTE)
    return torch.autograd.grad(out, leaves, heads.dout_BHTE, retain_graph=True)


def _try_one(name: str, kind: SDPBackend, sets: list[_Heads], device: torch.device) -> AttentionBackend:
    # torch warns at length about each kernel it may not use.
    with warnings.catch_warnings(), sdpa_kernel(kind), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            forward = time_call(rotating(_attend, sets), device)
            backward = time_call(rotating(_differentiate, [(heads, _attend(heads)) for heads in sets]), device)
        except RuntimeError as error:
            return AttentionBackend(name, (str(error).splitlines() or ["no reason given"])[0])
    return AttentionBackend(name, "", {"forward": forward, "backward": backward})


def _medians(passes: list[list[AttentionBackend]]) -> list[AttentionBackend]:
    """Returns the medians by backend. One that failed in any pass has failed."""
    tries_of: dict[str, list[AttentionBackend]] = {}
    for one in itertools.chain.from_iterable(passes):
        tries_of.setdefault(one.name, []).append(one)
    medians = []
    for name, tries in tries_of.items():
        failed = next((one.failed for one in tries if one.failed), "")
        seconds = {} if failed else {way: statistics.median(one.seconds[way] for one in tries) for way in DIRECTIONS}
        medians.append(AttentionBackend(name, failed, seconds))
    return medians


def _fastest(backends: list[AttentionBackend]) -> AttentionBackend:
    running = [one for one in backends if not one.failed]
    if not running:
        why = "; ".join(f"{one.name}: {one.failed}" for one in backends)
        raise MachineError("attention", f"no backend of torch runs it ({why})", "Try a smaller train.micro_batch.")
    return min(running, key=lambda one: sum(one.seconds.values()))


def _row(name: str, count: int, flops: int, seconds: float) -> FloorRow:
    return FloorRow(name, count, flops, seconds * 1e3, flops / seconds / 1e12)


def describe(floor: Floor) -> Shown:
    """Yields the device, a table of all rows, the attention backends and the sum."""
    size = f"{floor.micro_batch} × {floor.sequence_length} tokens"
    yield in_words(floor.measured_on, floor.dtype, size, f"median of {floor.rounds} rounds")
    rows = [
        (row.name, str(row.count), f"{row.milliseconds:.4f}", f"{row.teraflops_per_second:.4g}") for row in floor.rows
    ]
    yield Table(("", "count", "ms", "TFLOP/s"), rows)
    tries = [
        f"{one.name} does not run ({one.failed})"
        if one.failed
        else f"{one.name} {' + '.join(f'{1e3 * seconds:.4f}' for seconds in one.seconds.values())} ms"
        for one in floor.attention_backends
    ]
    yield f"attention: {', '.join(tries)}"
    total = [f"{floor.microseconds_per_token:.3f} us/token", f"{floor.tokens_per_second:,.0f} tok/s at the floor"]
    shares = {"MFU": floor.mfu_origin, "MFU exact": floor.mfu_exact}
    yield " | ".join([*total, *(f"{name} {share:.1%}" for name, share in shares.items() if share is not None)])
