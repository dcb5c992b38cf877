"""Script for the deepspeed launcher that counts the messages DeepSpeed sends in optimizer steps.

The file named on the command line holds a JSON list of lists of overrides, one per training. Next to it rank 0 writes
the messages that it sent in the last step of each training, and the losses.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups

from z2all_ds.base.config import load_run_config
from z2all_ds.base.world import World
from z2all_ds.model import Z2allConfig, Z2allForCausalLM
from z2all_ds.model.recompute import set_recompute
from z2all_ds.ops import Situation, resolve_ops
from z2all_ds.train.hooks.communication import COLLECTIVES
from z2all_ds.zero import engine as ds
from z2all_ds.zero.ds_config import resolve

SMALLEST = 64
"""Size in bytes from which a message counts; norms and flags are only a few numbers."""
Calls = Counter[tuple[str, int, int]]
"""Number of calls by (collective, bytes of the whole message, number of ranks)."""


class Traffic:
    """A counter of messages, active from its creation until `close`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._calls: Calls = Counter()
        self._inside = False
        self._wrapped = [name for name in COLLECTIVES if hasattr(backend, name)]
        for name in self._wrapped:
            setattr(backend, name, self._counted(name, getattr(backend, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self._inside:  # a collective may consist of others
                return real(*arguments, **named)
            whole = max(bytes_of(value) for value in (*arguments, *named.values()))
            ranks = torch.distributed.get_world_size(group_of(arguments, named))
            if whole >= SMALLEST:
                self._calls[name, whole, ranks] += 1
            self._inside = True
            try:
                return real(*arguments, **named)
            finally:
                self._inside = False

        return counted

    def take(self) -> Calls:
        calls, self._calls = self._calls, Counter()
        return calls

    def close(self) -> None:
        for name in self._wrapped:
            delattr(self._backend, name)  # restores the class's own method


def bytes_of(value: Any) -> int:
    """Return the size of a tensor or of a list of tensors; the larger of input and output is the whole message."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


def group_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    values = (*arguments, *named.values())
    return next((value for value in values if isinstance(value, torch.distributed.ProcessGroup)), None)


@contextmanager
def counting() -> Iterator[Traffic]:
    traffic = Traffic(ds.collectives_of_deepspeed())
    try:
        yield traffic
    finally:
        traffic.close()


def traffic_under(overrides: list[str], world: World) -> dict[str, Any]:
    run = load_run_config(None, overrides)
    resolved = resolve(run, world.world_size, "cpu")
    ops = resolve_ops(run.ops.model_dump(), Situation("cpu", resolved.dtype, run.model.shape.head_dim))
    config = Z2allConfig.from_section(run.model)
    model = ds.build_model(lambda: Z2allForCausalLM(config, ops), run, resolved, torch.device("cpu"))
    set_recompute(model, run.train.activation_checkpointing, run.train.recompute)
    model.train()
    engine = ds.build_engine(model, run, resolved)
    generator = torch.Generator().manual_seed(world.rank)
    samples, length = run.train.micro_batch, run.train.sequence_length
    positions = torch.arange(length).expand(samples, -1)
    losses = []
    with counting() as traffic:
        for _ in range(run.train.steps):
            traffic.take()
            for _ in range(resolved.accumulation):
                ids = torch.randint(0, run.model.vocab_size, (samples, length + 1), generator=generator)
                outputs = engine(input_ids=ids[:, :-1], position_ids=positions, next_tokens=ids[:, 1:])
                engine.backward(outputs.loss)
                engine.step()
                losses.append(outputs.losses.double().mean().item())
        sent = [[*call, count] for call, count in sorted(traffic.take().items())]
    engine.destroy()
    # DeepSpeed never deletes the groups of a hierarchical partition and refuses to create them twice in a process.
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return {"sent": sent, "losses": losses}


if __name__ == "__main__":
    plan = Path(sys.argv[-1])
    here = World.from_environment()
    ds.start_process_group(here, torch.device("cpu"))
    answers = [traffic_under(overrides, here) for overrides in json.loads(plan.read_text(encoding="utf-8"))]
    if here.is_main:
        plan.with_name("traffic.json").write_text(json.dumps(answers), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Two of about twenty launches ended with "terminate called without an active exception", at least one of them after
    # everything was written, while Python was shutting down. So the normal shutdown is skipped.
    sys.stderr.flush()
    os._exit(0)
