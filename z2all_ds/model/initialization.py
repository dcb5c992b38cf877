"""Initial weights that are a function of the seed, the parameter's name and its shape, and of nothing else.

torch's way draws all parameters one after the other from one generator: another order of construction, a device, a
partition under ZeRO-3, and the weights are others. Here each parameter has a generator of its own, seeded by the seed
and the name, so that one rank or many, with `zero.Init` or without, give the same bits. numpy draws them, in blocks on
all threads: on one thread already twice as fast as torch (8 to 10 ns a value against 20 to 25), and by the same steps
on every processor.
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
"""Inside it a parameter is whole, and what is written into it stays."""

VALUES_PER_BLOCK = 1 << 20
"""Large enough to keep a thread busy for milliseconds. Part of what a seed means: another size, other weights."""


def initialise_weights(model: PreTrainedModel, seed: int, gathered: Gathered = nullcontext) -> None:
    """Matrices normal with deviation `initializer_range`, norms 1, biases 0, the padding token's row 0.

    Under `deepspeed.zero.Init`, `gathered` is `lambda parameter: GatheredParameters(parameter, modifier_rank=0)`; one
    parameter is whole at a time. All ranks must call it. A tied head is the embedding and is drawn once.
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
                parameter.copy_(values.to(parameter.dtype))  # rounded here, half of it goes to a GPU
                module = model.get_submodule(module_name)
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    parameter[module.padding_idx].zero_()


def normal_values(seed: int, name: str, shape: torch.Size, threads: Executor) -> Tensor:
    """Standard normal fp32 on the CPU, whatever the parameter's dtype and device: those only round and copy it."""
    values = numpy.empty(shape.numel(), dtype=numpy.float32)

    def draw_block(begin: int) -> None:
        digest = hashlib.sha256(f"{seed}/{name}/{begin}".encode()).digest()
        generator = numpy.random.Generator(numpy.random.SFC64(int.from_bytes(digest, "little")))
        generator.standard_normal(dtype=numpy.float32, out=values[begin : begin + VALUES_PER_BLOCK])

    # numpy lets go of the interpreter while it draws.
    list(threads.map(draw_block, range(0, len(values), VALUES_PER_BLOCK)))
    return torch.from_numpy(values).view(shape)


def materialise(model: PreTrainedModel, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Gives a model built under `torch.device("meta")` its memory, which `initialise_weights` then fills."""
    model.to(dtype=dtype).to_empty(device=device)
    model.tie_weights()  # to_empty gives each of the two names a tensor of its own
