"""Activation checkpointing: activations inside a layer are recomputed in the backward pass instead of kept.

full: a layer keeps only its input (as in transformers). selective: the listed halves keep only their input. The
feed-forward saves the most memory for its cost, since gate_up is the widest activation of a layer; next is attention,
whose kernel has to run again.

Under ZeRO-3, the weights of the whole layer are gathered before its backward pass, so recomputation finds them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.checkpoint import checkpoint

RECOMPUTABLE_PARTS = ("attention", "mlp")


def set_recompute(model: Any, choice: str, parts: Iterable[str] = ()) -> None:
    """Apply `train.activation_checkpointing` and `train.recompute` to a Z2allForCausalLM."""
    parts = frozenset(parts) if choice == "selective" else frozenset()
    assert choice in ("none", "full", "selective") and parts <= frozenset(RECOMPUTABLE_PARTS), (choice, parts)
    if model.is_gradient_checkpointing:
        model.gradient_checkpointing_disable()
    if choice == "full":
        draws = any(layer.draws_random_numbers for layer in model.model.layers)
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": draws})
    for layer in model.model.layers:
        layer.recomputed_parts = parts


def recompute(part: Callable[..., Any], *inputs: Any, draws_random_numbers: bool) -> Any:
    """Compute `part(*inputs)` and keep only the inputs. Random numbers must be the same in the recomputation.

    Saving their state makes the host wait for the device, so it is done only if they are used.
    """
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=draws_random_numbers)
