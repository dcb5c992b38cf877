"""Seeds, saves and restores the random generators that training may use."""

import random
from typing import Any

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed all generators; with the same seed on every rank, initial weights are the same too."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states as tensors and plain values, which load without pickled code."""
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
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    numpy.random.set_state((name, words.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
