"""Initial weights as a function of the seed, the parameter's name and its shape only.

torch draws all parameters one after the other from one generator, so the weights depend on the order of construction,
the device and the partitioning of ZeRO-3. Here each parameter has its own generator, seeded with the seed and the name,
so that one rank or many, with or without `zero.Init`, give the same bits. numpy draws them in blocks on all threads:
even on one thread it is twice as fast as torch (8 to 10 ns per value instead of 20 to 25), with the same results on
every CPU.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Gathered = Callable[[nn.Parameter], AbstractContextManager[Any]]
"""Context in which a parameter is complete, and what is written into it is kept."""

VALUES_PER_BLOCK = 1 << 20
"""Large enough to keep a thread busy for milliseconds. Weights depend on it: do not change."""


def initialise_weights(model: PreTrainedModel, seed: int, gathered: Gathered = nullcontext) -> None:
    """Initialize matrices as normal with deviation `initializer_range`, norms as 1, biases and the padding row as 0.

    Under `deepspeed.zero.Init`, `gathered` is `lambda parameter: GatheredParameters(parameter, modifier_rank=0)`; one
    parameter is gathered at a time. All ranks must call it. A tied head is the embedding and is drawn once.
    """
    spread = model.config.initializer_range
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for name, parameter in model.named_parameters():
            module_name, _, own_name = name.rpartition(".")
            with gathered(parameter), torch.no_grad():
                assert not parameter.is_meta, f"{name} has no memory yet: materialise the model first"
                if parameter.dim() == 1:
                    parameter.fill_(0.0 if own_name == "bias" else 1.0)
                    continue
                values = normal_values(seed, name, parameter.shape, threads).mul_(spread)
                parameter.copy_(values.to(parameter.dtype))  # rounded first: half the bytes are copied to a GPU
                module = model.get_submodule(module_name)
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    parameter[module.padding_idx].zero_()


def normal_values(seed: int, name: str, shape: torch.Size, threads: Executor) -> Tensor:
    """Return standard normal fp32 values on the CPU, independent of the parameter's dtype and device."""
    values = numpy.empty(shape.numel(), dtype=numpy.float32)

    def draw_block(begin: int) -> None:
        digest = hashlib.sha256(f"{seed}/{name}/{begin}".encode()).digest()
        generator = numpy.random.Generator(numpy.random.SFC64(int.from_bytes(digest, "little")))
        generator.standard_normal(dtype=numpy.float32, out=values[begin : begin + VALUES_PER_BLOCK])

    # numpy releases the GIL while it draws.
    list(threads.map(draw_block, range(0, len(values), VALUES_PER_BLOCK)))
    return torch.from_numpy(values).view(shape)


def materialise(model: PreTrainedModel, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Allocate the memory of a model built under `torch.device("meta")`; `initialise_weights` then fills it."""
    model.to(dtype=dtype).to_empty(device=device)
    model.tie_weights()  # to_empty gives each of the two names a separate tensor
