"""Bytes that a micro-batch keeps between its forward and its backward pass, and its temporary tensors.

The counts follow from the ops: for each backend, the tensors that its backward pass needs. A tensor that several ops
keep (such as the output of a norm that is the input of a product) is counted once, with the last of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from z2all_ds.base.accounting import ModelShape

FP32 = 4
CHUNK_LOGITS = 2**26
"""As in ops/cross_entropy.py; a test compares them."""
ON_A_GPU = {
    "attention": "packed",
    "rope": "triton",
    "rms_norm": "triton",
    "swiglu": "triton",
    "linear": "torch",
    "cross_entropy": "triton",
}
"""Backends that `auto` selects on a GPU with Triton, which torch installs."""
COMPILED = {"rope": "torch", "swiglu": "compiled"}
"""Backends that differ where torch.compile fuses the reference ops of a layer."""


def chosen_ops(asked: Mapping[str, str], dtype: str = "bf16", compiled: bool = False) -> dict[str, str]:
    """Return the backends with `auto` replaced. In fp32 torch computes attention by the formula (seen on an H200)."""
    auto = {**ON_A_GPU, **COMPILED} if compiled else ON_A_GPU
    chosen = {op: auto[op] if asked.get(op, "auto") == "auto" else asked[op] for op in ON_A_GPU}
    if dtype == "fp32" and chosen["attention"] in ("packed", "sdpa"):
        chosen["attention"] = "math"
    return chosen


@dataclass(frozen=True)
class Activations:
    """Activations of one micro-batch on one GPU, in bytes."""

    kept: int  # Kept by all layers, the embedding and the last norm until their backward pass
    logits: int  # Peak of the head: logits, what the loss keeps of them, and gradients
    again: int  # Recomputed for one layer, or for a part of it, before its backward pass
    backward: int  # Gradients inside a layer during its backward pass

    def temporary(self, graphs: bool) -> int:
        """Return the peak of all that is not kept.

        The layers reuse the memory of the head. In CUDA graphs, whose memory is laid out at capture, only recomputed
        tensors reuse it (seen on an H200, with and without checkpointing).
        """
        if graphs:
            return max(self.logits, self.again) + self.backward
        return max(self.logits, self.again + self.backward)


def activations(
    shape: ModelShape,
    tokens: int,
    sequence_length: int,
    ops: Mapping[str, str],
    compute_bytes: int = 2,
    stream_bytes: int = 2,
    checkpointing: str = "none",
    recompute: tuple[str, ...] = (),
) -> Activations:
    """Count one micro-batch of `tokens` in samples of `sequence_length`; `ops` as `chosen_ops` returns them."""
    hidden = shape.hidden_size
    norm = stream_bytes * hidden + FP32  # the stream and one number per row
    if ops["rms_norm"] == "torch":  # keeps the stream in fp32, and the normed stream
        norm = (FP32 + compute_bytes) * hidden + FP32
    product_input = hidden * (compute_bytes if ops["linear"] == "torch" else 1)
    halves = {
        "attention": norm + product_input + _attention(shape, sequence_length, ops, compute_bytes),
        "mlp": norm + product_input + _mlp(shape, ops, compute_bytes),
    }
    inputs = (compute_bytes + stream_bytes) * hidden
    if checkpointing == "full":
        per_layer, again = inputs, sum(halves.values())
    else:
        parts = recompute if checkpointing == "selective" else ()
        per_layer = sum(inputs if part in parts else size for part, size in halves.items())
        # One half's output stream is the other half's input, so it is kept once.
        per_layer -= stream_bytes * hidden if len(parts) == 1 else 0
        again = max((halves[part] for part in parts), default=0)
    rotation_and_ids = 2 * compute_bytes * shape.head_dim + 3 * 8
    kept = shape.num_layers * per_layer + norm + compute_bytes * hidden + rotation_and_ids
    # Gradients in the MLP, which has the widest tensors: of gate, up and their product, which Triton recomputes.
    wide = 4 if ops["swiglu"] == "triton" else 3
    backward = wide * shape.intermediate_size * compute_bytes + inputs
    if ops["attention"] in ("eager", "math"):  # without a kernel: gradients of weights and scores over all positions
        backward = max(backward, 2 * FP32 * shape.num_heads * sequence_length)
    return Activations(
        kept=tokens * kept,
        logits=_logits(shape, tokens, ops, compute_bytes) + tokens * compute_bytes * hidden,
        again=tokens * again,
        backward=tokens * backward,
    )


def _attention(shape: ModelShape, sequence_length: int, ops: Mapping[str, str], compute_bytes: int) -> int:
    """Count, per token, q, k and v, rotated positions, attention, and the input of the output product."""
    width, kv, heads = shape.attention_width, shape.num_kv_heads * shape.head_dim, shape.num_heads
    fused = width + 2 * kv
    rotated = fused if ops["rope"] == "triton" else fused + width + kv  # others also keep the fused product, for v
    # The output product's input is attention's output, unless the product keeps its own copy in 8 bits.
    own_copy = width if ops["linear"] != "torch" else 0
    if ops["attention"] == "eager":
        # Expanded keys and values; weights over all positions in fp32 and in the model's dtype.
        kernel = 3 * width * compute_bytes + heads * sequence_length * (FP32 + compute_bytes)
    elif ops["attention"] == "math":
        kernel = 5 * width * compute_bytes + heads * sequence_length * FP32  # and scaled queries and keys
    else:
        kernel = width * compute_bytes + heads * FP32  # the output, and one sum per row
    return rotated * compute_bytes + kernel + own_copy


def _mlp(shape: ModelShape, ops: Mapping[str, str], compute_bytes: int) -> int:
    """Count, per token, gate and up, and the input of the down product."""
    f, swiglu = shape.intermediate_size, ops["swiglu"]
    product = {"triton": 0, "liger": f, "xformers": f, "compiled": f, "torch": 2 * f}[swiglu] * compute_bytes
    if ops["linear"] != "torch":  # the down product keeps its input in 8 bits
        product = f + (product - f * compute_bytes if swiglu != "triton" else 0)
    # Compiled, attention's output is kept in addition to the sum that it is added to.
    output = compute_bytes * shape.hidden_size if swiglu == "compiled" else 0
    return 2 * f * compute_bytes + product + output


def _logits(shape: ModelShape, tokens: int, ops: Mapping[str, str], compute_bytes: int) -> int:
    """Count the logits of a micro-batch at the peak of the loss."""
    count, kind = tokens * shape.vocab_size, ops["cross_entropy"]
    if kind == "chunked":
        return min(count, CHUNK_LOGITS) * compute_bytes
    if kind in ("triton", "flash_attn"):
        return count * compute_bytes
    if kind == "liger":  # also in fp32
        return count * (compute_bytes + FP32)
    return count * (compute_bytes + 2 * FP32)  # torch: in fp32, and their logarithms
