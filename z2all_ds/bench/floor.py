"""`z2all bench floor`: what the matrix products and the attention of a training step cost here, and nothing else.

No step that computes these products with these libraries in this precision is faster, so the distance to it is what
norms, rotations, the loss, the optimizer, launches and communication cost. Everything is measured at the model's own
shapes, one micro-batch at a time. A pass goes over all rows before any is repeated, because clocks sink under load:
every row meets the warm device, and the medians are over passes. Attention is over whole sequences: where documents are
masked apart, a step may have less to do.
"""

import itertools
import json
import statistics
import warnings
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from z2all_ds.base.accounting import FLOP_CONVENTIONS, ModelShape, flops_per_token, mfu, peak_flops
from z2all_ds.base.config import RunConfig
from z2all_ds.base.console import progress
from z2all_ds.base.errors import MachineError
from z2all_ds.bench.products import PRODUCTS, linears_of, require_room, time_products, training_dtype
from z2all_ds.bench.timing import check_rounds, in_words, measured_on, require_memory, rotating, sets_needed, time_call

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
    """One kind of call, `count` of them in a micro-batch."""

    name: str
    count: int
    flops: int
    """Of one call; attention over the causal half."""
    milliseconds: float
    """Of one call."""
    teraflops_per_second: float


@dataclass(frozen=True)
class AttentionBackend:
    """One of torch's attention kernels at this shape; one that does not run says why and has no figures."""

    name: str
    failed: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Of one call in each of DIRECTIONS."""


@dataclass(frozen=True)
class Floor:
    """Medians, with everything needed to run it again. Figures are of one device."""

    measured_on: dict[str, str]
    dtype: str
    micro_batch: int
    sequence_length: int
    rounds: int
    rows: list[FloorRow]
    attention_backend: str
    """The fastest, which the rows have."""
    attention_backends: list[AttentionBackend]
    microseconds_per_token: float
    tokens_per_second: float
    mfu_origin: float | None
    """6N + 12·L·d·S, embeddings counted."""
    mfu_exact: float | None
    """Products only, causal attention counted half."""


def measure_floor(run: RunConfig, device: torch.device, rounds: int = ROUNDS) -> Floor:
    """The floor of the run's model and micro-batch on one device."""
    check_rounds(rounds)
    shape, dtype = run.model.shape, training_dtype(device, run.train.precision)
    micro_batch, sequence_length = run.train.micro_batch, run.train.sequence_length
    tokens = micro_batch * sequence_length
    linears = linears_of(shape)
    require_room(linears, tokens, device, dtype)
    # A GPU's first pass finds it cold and its libraries unloaded.
    unmeasured = 1 if device.type == "cuda" else 0
    products, attention = [], []
    with progress("floor", total=(unmeasured + rounds) * (len(linears) + 1), unit="shapes") as advance:
        for _ in range(unmeasured + rounds):
            products.append(dict[str, float]())
            for linear in linears:
                for product, seconds in time_products(linear, tokens, device, dtype).items():
                    products[-1][f"{linear.name} {product}"] = seconds
                advance(1, linear.name)
            attention.append(try_attention(shape, micro_batch, sequence_length, device, dtype))
            advance(1, "attention")
    backends = _medians(attention[unmeasured:])
    fastest = _fastest(backends)
    rows = [
        _row(name, linear.count, linear.flops_per_product(tokens), [one[name] for one in products[unmeasured:]])
        for linear in linears
        for name in (f"{linear.name} {product}" for product in PRODUCTS)
    ]
    flops = attention_flops(shape, tokens, sequence_length)
    rows += [
        _row(f"attention {direction}", shape.num_layers, flops[direction], [fastest.seconds[direction]])
        for direction in DIRECTIONS
    ]
    seconds_per_token = sum(row.count * row.milliseconds for row in rows) / 1e3 / tokens
    facts = measured_on(device)
    peak = peak_flops(facts["device"])
    flops_by_convention = {name: flops_per_token(shape, sequence_length, name) for name in FLOP_CONVENTIONS}
    return Floor(
        measured_on=facts,
        dtype=str(dtype).removeprefix("torch."),
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        rounds=rounds,
        rows=rows,
        attention_backend=fastest.name,
        attention_backends=backends,
        microseconds_per_token=seconds_per_token * 1e6,
        tokens_per_second=1 / seconds_per_token,
        mfu_origin=mfu(1 / seconds_per_token, flops_by_convention["origin"], peak),
        mfu_exact=mfu(1 / seconds_per_token, flops_by_convention["exact"], peak),
    )


def attention_flops(shape: ModelShape, tokens: int, sequence_length: int) -> dict[str, int]:
    """Of one layer, over the causal half; what the backward pass computes a second time is not counted."""
    forward = 2 * shape.attention_width * sequence_length * tokens
    return {"forward": forward, "backward": 2 * forward}


def try_attention(
    shape: ModelShape, batch: int, sequence_length: int, device: torch.device, dtype: torch.dtype
) -> list[AttentionBackend]:
    """One layer's causal attention, forward and backward, with each of torch's backends."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    # In and out of both directions, about: the tensors of one forward call, and as much again for gradients.
    set_bytes = batch * sequence_length * (heads + shape.num_heads) * shape.head_dim * dtype.itemsize
    num_sets = sets_needed(set_bytes, device)
    require_memory(2 * num_sets * set_bytes, device, f"attention with {batch} × {sequence_length} tokens")
    sets = [_random_heads(shape, batch, sequence_length, device, dtype) for _ in range(num_sets)]
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


def _random_heads(
    shape: ModelShape, batch: int, sequence_length: int, device: torch.device, dtype: torch.dtype
) -> _Heads:
    """q, k and v as our rope leaves them, each [B, T, heads, E] in memory: kernels read these faster than parts of one
    fused tensor. Each is a leaf: the backward is attention's alone."""

    def heads(count: int) -> Tensor:
        x_BTHE = torch.randn(batch, sequence_length, count, shape.head_dim, device=device, dtype=dtype)
        return x_BTHE.transpose(1, 2)

    q, k, v = (heads(count).requires_grad_() for count in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    return _Heads(q, k, v, heads(shape.num_heads))


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
    """One that failed in any pass has failed."""
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


def _row(name: str, count: int, flops: int, seconds: list[float]) -> FloorRow:
    median = statistics.median(seconds)
    return FloorRow(name, count, flops, median * 1e3, flops / median / 1e12)


def to_json(floor: Floor) -> str:
    return json.dumps(asdict(floor), indent=2, ensure_ascii=False)


def to_lines(floor: Floor) -> list[str]:
    """For people."""
    facts = in_words(floor.measured_on)
    facts += [floor.dtype, f"{floor.micro_batch} × {floor.sequence_length} tokens", f"median of {floor.rounds} rounds"]
    tries = [
        f"{one.name} does not run ({one.failed})"
        if one.failed
        else f"{one.name} {' + '.join(f'{1e3 * seconds:.4f}' for seconds in one.seconds.values())} ms"
        for one in floor.attention_backends
    ]
    total = [f"{floor.microseconds_per_token:.3f} us/token", f"{floor.tokens_per_second:,.0f} tok/s at the floor"]
    total += [f"{name} {100 * share:.1f}%" for name, share in
              (("MFU", floor.mfu_origin), ("MFU exact", floor.mfu_exact)) if share is not None]  # fmt: skip
    return [
        " | ".join(facts),
        f"{'':24}{'count':>6}{'ms':>11}{'TFLOP/s':>11}",
        *(f"{row.name:24}{row.count:6d}{row.milliseconds:11.4f}{row.teraflops_per_second:11.4g}" for row in floor.rows),
        f"attention: {', '.join(tries)}",
        " | ".join(total),
    ]
