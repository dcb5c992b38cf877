"""Bytes per token that a micro-batch keeps between its forward and its backward pass, and what comes and goes beside.

Read off the ops themselves: for each backend, the tensors that its backward pass needs. A tensor that several keep (the
input of a product that a norm has made) is counted once, with the one that comes last. D hidden size, K width of all
key/value heads, F intermediate size, H heads, V vocabulary.
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
"""What `auto` takes there, with Triton, which comes with torch."""
COMPILED = {"rope": "torch", "swiglu": "compiled"}
"""What differs where torch.compile fuses the reference ops of a layer."""


def chosen_ops(asked: Mapping[str, str], dtype: str = "bf16", compiled: bool = False) -> dict[str, str]:
    """With `auto` replaced. In fp32 torch computed attention by the formula, with and without documents (H200)."""
    auto = {**ON_A_GPU, **COMPILED} if compiled else ON_A_GPU
    chosen = {op: auto[op] if asked.get(op, "auto") == "auto" else asked[op] for op in ON_A_GPU}
    if dtype == "fp32" and chosen["attention"] in ("packed", "sdpa"):
        chosen["attention"] = "math"
    return chosen


@dataclass(frozen=True)
class Activations:
    """Of one micro-batch on one GPU, in bytes."""

    kept: int
    """By all layers, the embedding and the last norm, until the backward pass has come by."""
    logits: int
    """The head at its largest: logits, what the loss keeps of them, and gradients."""
    again: int
    """What is made again of one layer, or of a part of it, before that is run backward."""
    backward: int
    """Gradients inside a layer while it is run backward."""

    def beside(self, graphs: bool) -> int:
        """What there is beside what is kept, at most. The head's part is given back before the layers' turn and used
        again. In CUDA graphs less so: their memory is laid out at capture, and of the pieces into which the logits fall
        only what is made again found its place (seen on an H200, with and without checkpointing)."""
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
    """`tokens` of one micro-batch, in samples of `sequence_length`; `ops` as `chosen_ops` gives them."""
    inputs, stream = (compute_bytes + stream_bytes) * shape.hidden_size, stream_bytes * shape.hidden_size
    halves = {
        "attention": attention_half(shape, sequence_length, ops, compute_bytes, stream_bytes),
        "mlp": mlp_half(shape, ops, compute_bytes, stream_bytes),
    }
    if checkpointing == "full":
        per_layer, again = inputs, sum(halves.values())
    else:
        parts = recompute if checkpointing == "selective" else ()
        per_layer = sum(inputs if part in parts else size for part, size in halves.items())
        # The stream is handed to the next half as it is: where one keeps it, it is the other's input, too.
        per_layer -= stream if len(parts) == 1 else 0
        again = max((halves[part] for part in parts), default=0)
    last_norm = norm(shape, ops, compute_bytes, stream_bytes)
    rotation_and_ids = 2 * compute_bytes * shape.head_dim + 3 * 8
    kept = shape.num_layers * per_layer + last_norm + compute_bytes * shape.hidden_size + rotation_and_ids
    head = logits(shape, tokens, ops, compute_bytes) + tokens * compute_bytes * shape.hidden_size
    backward = max(
        backward_of_mlp(shape, ops, compute_bytes, stream_bytes), backward_of_attention(shape, sequence_length, ops)
    )
    return Activations(kept=tokens * kept, logits=head, again=tokens * again, backward=tokens * backward)


def attention_half(
    shape: ModelShape, sequence_length: int, ops: Mapping[str, str], compute_bytes: int, stream_bytes: int
) -> int:
    """Norm, the product for q, k and v, positions, attention, its output product."""
    d, k, h = shape.attention_width, shape.num_kv_heads * shape.head_dim, shape.num_heads
    fused = d + 2 * k
    turned = fused if ops["rope"] == "triton" else fused + d + k  # others leave v in the fused product, and keep it
    products = product_input(shape.hidden_size, ops, compute_bytes)
    # The output product's input is what attention keeps, unless it is kept in 8 bits of its own.
    own_copy = d if ops["linear"] != "torch" else 0
    if ops["attention"] == "eager":
        # Expanded keys and values; weights in fp32 and in the model's dtype, over all positions.
        kernel = 3 * d * compute_bytes + h * sequence_length * (FP32 + compute_bytes)
    elif ops["attention"] == "math":
        kernel = 5 * d * compute_bytes + h * sequence_length * FP32  # and queries and keys that are scaled
    else:
        kernel = d * compute_bytes + h * FP32  # the output, and a sum per row
    return norm(shape, ops, compute_bytes, stream_bytes) + products + turned * compute_bytes + kernel + own_copy


def mlp_half(shape: ModelShape, ops: Mapping[str, str], compute_bytes: int, stream_bytes: int) -> int:
    """Norm, the product for gate and up, SwiGLU with the product after it."""
    f, fp8 = shape.intermediate_size, ops["linear"] != "torch"
    gate_up = 2 * f * compute_bytes
    product = {"triton": 0, "liger": f, "xformers": f, "compiled": f, "torch": 2 * f}[ops["swiglu"]] * compute_bytes
    if fp8:  # the product's input is kept in 8 bits, by the product
        product = f + (product - f * compute_bytes if ops["swiglu"] != "triton" else 0)
    inputs = product_input(shape.hidden_size, ops, compute_bytes)
    # Compiled, the attention's output is kept beside the sum that it goes into.
    again = compute_bytes * shape.hidden_size if ops["swiglu"] == "compiled" else 0
    return norm(shape, ops, compute_bytes, stream_bytes) + inputs + gate_up + product + again


def norm(shape: ModelShape, ops: Mapping[str, str], compute_bytes: int, stream_bytes: int) -> int:
    """The stream and a number a row; torch's own keeps it in fp32 and, once more, normed."""
    if ops["rms_norm"] == "torch":
        return (FP32 + compute_bytes) * shape.hidden_size + FP32
    return stream_bytes * shape.hidden_size + FP32


def product_input(width: int, ops: Mapping[str, str], compute_bytes: int) -> int:
    return width * (compute_bytes if ops["linear"] == "torch" else 1)


def logits(shape: ModelShape, tokens: int, ops: Mapping[str, str], compute_bytes: int) -> int:
    """All of a micro-batch, at the largest moment."""
    all_of_them = tokens * shape.vocab_size
    kind = ops["cross_entropy"]
    if kind == "chunked":
        return min(all_of_them, CHUNK_LOGITS) * compute_bytes
    if kind in ("triton", "flash_attn"):
        return all_of_them * compute_bytes
    if kind == "liger":  # as the product makes them, and in fp32
        return all_of_them * (compute_bytes + FP32)
    return all_of_them * (compute_bytes + 2 * FP32)  # torch: and their logarithms


def backward_of_attention(shape: ModelShape, sequence_length: int, ops: Mapping[str, str]) -> int:
    """Where there is no kernel for it: gradients of weights and of what they were made of, over all positions."""
    by_formula = ops["attention"] in ("eager", "math")
    return 2 * FP32 * shape.num_heads * sequence_length if by_formula else 0


def backward_of_mlp(shape: ModelShape, ops: Mapping[str, str], compute_bytes: int, stream_bytes: int) -> int:
    """The half with the widest tensors: gradients of gate, up and their product, and that product made again."""
    again = 1 if ops["swiglu"] == "triton" else 0
    inside = (3 + again) * shape.intermediate_size * compute_bytes
    return inside + (compute_bytes + stream_bytes) * shape.hidden_size
