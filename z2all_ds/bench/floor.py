"""`z2all bench floor`: the cost of only the matrix products and the attention of a training step on this device.

No step that computes these products with these libraries in this precision is faster. The distance to the floor is the
cost of norms, rotations, the loss, the optimizer, launches and communication. Attention is over whole sequences.
"""

import itertools
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from z2all_ds.base.accounting import ModelShape, flops_per_token, mfu, peak_flops
from z2all_ds.base.config import RunConfig
from z2all_ds.base.errors import MachineError
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.products import PRODUCTS, linears_of, require_room, time_products, training_dtype
from z2all_ds.bench.shared import Report, require_at_least
from z2all_ds.bench.timing import (
    head_line,
    measure_in_passes,
    measured_on,
    require_memory,
    rotating,
    sets_needed,
    time_call,
)

ATTENTION_BACKENDS = {
    "cuda": {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    },
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}


def measure_floor(run: RunConfig, device: torch.device, rounds: int) -> Report:
    """Measure the floor of the run's model and micro-batch on one device.

    A row is one kind of call, `count` of them per micro-batch, with its figures per call. The attention rows have the
    fastest backend; `attention_backends` has the seconds of all, or the reason if one does not run.
    """
    require_at_least(1, rounds=rounds)
    shape, dtype = run.model.shape, training_dtype(device, run.train.precision)
    micro_batch, sequence_length = run.train.micro_batch, run.train.sequence_length
    tokens = micro_batch * sequence_length
    linears = linears_of(shape)
    require_room(linears, tokens, device, dtype)
    attention = Attention(shape, micro_batch, sequence_length, device, dtype)
    kinds = ATTENTION_BACKENDS[device.type]
    failures = {name: attention.failure(kind) for name, kind in kinds.items()}
    if all(failures.values()):
        why = "; ".join(f"{name}: {failure}" for name, failure in failures.items())
        raise MachineError("attention", f"no backend of torch runs it ({why})", "Try a smaller train.micro_batch.")
    running = [name for name in kinds if not failures[name]]
    cases = {
        **{linear.name: partial(time_products, linear, tokens, device, dtype) for linear in linears},
        **{name: partial(attention.measure, kinds[name]) for name in running},
    }
    seconds = measure_in_passes("floor", cases, device, rounds)
    fastest = min(running, key=lambda name: sum(seconds[name].values()))
    rows = [
        _row(f"{one.name} {product}", one.count, one.flops_per_product(tokens), seconds[one.name][product])
        for one, product in itertools.product(linears, PRODUCTS)
    ]
    for direction, flops in attention_flops(shape, tokens, sequence_length).items():
        rows.append(_row(f"attention {direction}", shape.num_layers, flops, seconds[fastest][direction]))
    seconds_per_token = sum(row["count"] * row["milliseconds"] for row in rows) / 1e3 / tokens
    facts = measured_on(device)
    origin, exact = (
        mfu(1 / seconds_per_token, flops_per_token(shape, sequence_length, convention), peak_flops(facts["device"]))
        for convention in ("origin", "exact")
    )
    return {
        "measured_on": facts,
        "dtype": str(dtype).removeprefix("torch."),
        "micro_batch": micro_batch,
        "sequence_length": sequence_length,
        "rounds": rounds,
        "rows": rows,
        "attention_backend": fastest,
        "attention_backends": [
            {"name": name, "failed": failures[name], "seconds": seconds.get(name, {})} for name in kinds
        ],
        "microseconds_per_token": seconds_per_token * 1e6,
        "tokens_per_second": 1 / seconds_per_token,
        "mfu_origin": origin,
        "mfu_exact": exact,
    }


def attention_flops(shape: ModelShape, tokens: int, sequence_length: int) -> dict[str, int]:
    """Return the operations of one layer over the causal half, without recomputation in the backward pass."""
    forward = 2 * shape.attention_width * sequence_length * tokens
    return {"forward": forward, "backward": 2 * forward}


def _row(name: str, count: int, flops: int, seconds: float) -> dict[str, Any]:
    rate = {"milliseconds": seconds * 1e3, "teraflops_per_second": flops / seconds / 1e12}
    return {"name": name, "count": count, "flops": flops, **rate}


@dataclass(frozen=True)
class _Heads:
    q_BHTE: Tensor
    k_BKTE: Tensor
    v_BKTE: Tensor
    dout_BHTE: Tensor


@dataclass(frozen=True)
class Attention:
    """Causal attention of one layer at the model's shapes."""

    shape: ModelShape
    batch: int
    sequence_length: int
    device: torch.device
    dtype: torch.dtype

    def measure(self, kind: SDPBackend) -> dict[str, float]:
        """Return the seconds of one call, forward and backward."""
        sets = self._input_sets()
        # torch warns at length about each kernel that it may not use.
        with warnings.catch_warnings(), sdpa_kernel(kind), torch.enable_grad():
            warnings.simplefilter("ignore")
            forward = time_call(rotating(_attend, sets), self.device)
            backward = time_call(rotating(_differentiate, [(heads, _attend(heads)) for heads in sets]), self.device)
        return {"forward": forward, "backward": backward}

    def failure(self, kind: SDPBackend) -> str:
        """Return the reason if a backend does not run, else ""."""
        try:
            self.measure(kind)
        except RuntimeError as error:
            return (str(error).splitlines() or ["no reason given"])[0]
        return ""

    def _input_sets(self) -> list[_Heads]:
        counts = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        # q, k, v and the output; twice that with gradients.
        elements = self.batch * self.sequence_length * (sum(counts) + counts[0]) * self.shape.head_dim
        set_bytes = elements * self.dtype.itemsize
        num_sets = sets_needed(set_bytes, self.device)
        what = f"attention with {self.batch} × {self.sequence_length} tokens"
        require_memory(2 * num_sets * set_bytes, self.device, what)

        def random(heads: int) -> Tensor:
            # [B, T, heads, E] in memory, as our rope leaves it: kernels read this faster than parts of a fused tensor.
            size = (self.batch, self.sequence_length, heads, self.shape.head_dim)
            return torch.randn(size, device=self.device, dtype=self.dtype).transpose(1, 2)

        def random_set() -> _Heads:
            # q, k and v are leaves, so that the backward pass is only that of attention.
            q, k, v = (random(count).requires_grad_() for count in counts)
            return _Heads(q, k, v, random(counts[0]))

        return [random_set() for _ in range(num_sets)]


def _attend(heads: _Heads) -> Tensor:
    is_grouped = heads.q_BHTE.shape[1] != heads.k_BKTE.shape[1]
    return F.scaled_dot_product_attention(
        heads.q_BHTE, heads.k_BKTE, heads.v_BKTE, is_causal=True, enable_gqa=is_grouped
    )


def _differentiate(graph: tuple[_Heads, Tensor]) -> object:
    heads, out = graph
    leaves = (heads.q_BHTE, heads.k_BKTE, heads.v_BKTE)
    return torch.autograd.grad(out, leaves, heads.dout_BHTE, retain_graph=True)


def describe(floor: Report) -> Shown:
    """Yield the device, a table of all rows, the attention backends and the sum."""
    size = f"{floor['micro_batch']} × {floor['sequence_length']} tokens"
    yield head_line(floor["measured_on"], floor["dtype"], size, f"median of {floor['rounds']} rounds")
    rows = [
        (row["name"], str(row["count"]), f"{row['milliseconds']:.4f}", f"{row['teraflops_per_second']:.4g}")
        for row in floor["rows"]
    ]
    yield Table(("", "count", "ms", "TFLOP/s"), rows)
    backends = [
        f"{one['name']} does not run ({one['failed']})"
        if one["failed"]
        else f"{one['name']} {' + '.join(f'{1e3 * seconds:.4f}' for seconds in one['seconds'].values())} ms"
        for one in floor["attention_backends"]
    ]
    yield f"attention: {', '.join(backends)}"
    total = f"{floor['microseconds_per_token']:.3f} us/token | {floor['tokens_per_second']:,.0f} tok/s at the floor"
    shares = {"MFU": floor["mfu_origin"], "MFU exact": floor["mfu_exact"]}
    yield " | ".join([total, *(f"{name} {share:.1%}" for name, share in shares.items() if share is not None)])
