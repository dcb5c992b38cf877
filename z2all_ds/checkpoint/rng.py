"""State of the random generators, out and in."""

import random
from typing import Any

import numpy
import torch


def rng_name(rank: str) -> str:
    """Of a rank's file in a checkpoint."""
    return f"rng_rank_{rank}.pt"


def rng_state() -> dict[str, Any]:
    """Every random generator training may draw from, as tensors and plain values: loads without pickled code."""
    name, words, *rest = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(numpy.asarray(words).astype("int64")), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The way back."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    numpy.random.set_state((name, words.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
