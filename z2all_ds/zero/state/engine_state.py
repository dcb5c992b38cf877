"""Converts the state of an engine to state files, and loads state files into an engine of any shape.

Every rank writes the shards it updates and reads the shards it will update. States with one value per weight (master
weights, moments) are divided into pieces of parameters. States of a whole shard (codes and scales of 8-bit moments,
rows and columns of Adafactor) are called opaque: they go into a separate file per rank and can be loaded only into the
same shape.
"""

from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.disk_file import Content
from z2all_ds.checkpoint.layout import STATE_FOLDER, WEIGHT
from z2all_ds.checkpoint.state_files import DTYPES, Entry, StateReader, build_index, file_name
from z2all_ds.zero.optimizers.registry import KIND_KEY, require_same_states
from z2all_ds.zero.state.optimizer_shards import OptimizerShard, entries_of, optimizer_shards_of, weights_changed

ENGINE_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
STEP = "step"
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's fp16 loss scaler that change; the others are settings."""


@dataclass(frozen=True)
class RankState:
    """The state that one rank saves."""

    rank: int
    entries: list[Entry]
    shards: list[OptimizerShard]

    @property
    def name(self) -> str:
        """Path of its state file in a checkpoint."""
        return f"{STATE_FOLDER}/{file_name(self.rank)}"

    def tensors(self) -> Iterator[Tensor]:
        """Yield one-dimensional tensors in the order of the entries."""
        for shard in self.shards:
            with shard.resident(False):
                for values in _piecewise_tensors(shard).values():
                    yield from (piece.of(values) for piece in shard.pieces_to_write())

    def opaque_files(self) -> dict[str, Content]:
        """Return the file of opaque states by its path; empty if there are none."""
        states = {number: found for number, shard in enumerate(self.shards) if (found := _opaque_states(shard))}
        content = {"pieces": _pieces(self.shards), "states": states}
        return {_opaque_name(self.rank): partial(torch.save, content)} if states else {}


def rank_state(engine: Any) -> RankState:
    """Return the current state of this rank."""
    shards = optimizer_shards_of(engine)
    entries = [entries_of(_piecewise_tensors(shard), shard.pieces_to_write()) for shard in shards]
    return RankState(dist.get_rank(), list(chain.from_iterable(entries)), shards)


def index_of(engine: Any, entries_of_ranks: list[list[Entry]], is_opaque: bool) -> str:
    """Return index.json."""
    facts = {
        "ranks": len(entries_of_ranks),
        "optimizer": _kind(engine),
        "steps_taken": _steps_taken(optimizer_shards_of(engine)),
        "engine": {name: getattr(engine, name) for name in ENGINE_COUNTERS},
        "loss_scale": loss_scale(getattr(engine.optimizer, "loss_scaler", None)),
        "is_opaque": is_opaque,
    }
    return build_index(entries_of_ranks, _shapes(engine), facts)


def read_state(engine: Any, checkpoint: Path) -> None:
    """Load weights, optimizer and counters from a checkpoint of any shape. Collective."""
    reader = StateReader(checkpoint)
    index = reader.index
    require_same_states(index["optimizer"], _kind(engine))
    require_same_model(checkpoint.name, reader.shapes, "this model", _shapes(engine))
    shards = optimizer_shards_of(engine)
    opaque = _read_opaque(shards, index, checkpoint) if index["is_opaque"] else {}
    with weights_changed(engine), torch.no_grad():
        for number, shard in enumerate(shards):
            with shard.resident(True):
                if reader.state_keys or opaque:
                    _create_states(shard)
                for key, values in _piecewise_tensors(shard).items():
                    for piece in shard.pieces:
                        reader.read_into(piece.of(values), key, piece.name, piece.start)
                for key, value in opaque.get(number, {}).items():
                    shard.state[key] = value.to(shard.tensor.device) if isinstance(value, Tensor) else value
                if (steps := index["steps_taken"][shard.group]) is not None:
                    _set_steps_taken(shard, steps)
                shard.after_change()
    for name, value in index["engine"].items():
        setattr(engine, name, value)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if loss_scale(scaler):  # empty in the checkpoint if it has another precision: the scale starts from its setting
        for name, value in index["loss_scale"].items():
            setattr(scaler, name, value)
    _replay_cpu_adam(shards)


def has_needed_files(engine: Any, checkpoint: Path, files: Collection[str]) -> bool:
    """Return whether the files include all that this rank needs, whole; on another node they may be only some.

    Others in the folder do not count: they may be left from an earlier step.
    """
    try:
        reader = StateReader(checkpoint)
        ranks = {
            rank
            for shard in optimizer_shards_of(engine)
            for piece in shard.pieces
            for rank in reader.ranks_needed(piece.name, piece.start, piece.length)
        }
        return all(f"{STATE_FOLDER}/{file_name(rank)}" in files and reader.is_whole(rank) for rank in ranks)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, CheckpointError):
        return False


def require_same_model(source: str, saved: dict[str, list[int]], here: str, ours: dict[str, list[int]]) -> None:
    """Refuse a source whose parameters have other names or shapes."""
    for name in sorted({*saved, *ours}):
        if saved.get(name) != ours.get(name):
            raise CheckpointError(
                f"{source}: shape of {name} is {saved.get(name, 'missing')}",
                f"in {here} it is {ours.get(name, 'missing')}",
                "Set model.* as in the saved run.",
            )


def loss_scale(scaler: Any) -> dict[str, float]:
    """Return the state of DeepSpeed's loss scaler; empty unless it is fp16's dynamic scaler."""
    return {name: getattr(scaler, name) for name in LOSS_SCALE} if getattr(scaler, "dynamic", False) else {}


# Parts of the state


def _piecewise_tensors(shard: OptimizerShard) -> dict[str, Tensor]:
    """Return master weights and states with one value per weight, flat; they are empty while offloaded to a file."""
    states = {
        key: value
        for key, value in shard.state.items()
        if type(value) in (Tensor, nn.Parameter)
        and value.dtype in DTYPES
        and value.dim() > 0
        and value.numel() in (shard.numel, 0)
    }
    return {key: tensor.detach().view(-1) for key, tensor in {WEIGHT: shard.tensor, **states}.items()}


def _opaque_states(shard: OptimizerShard) -> dict[str, Any]:
    """Return the other states, except for single numbers."""
    piecewise = _piecewise_tensors(shard)
    return {key: value for key, value in shard.state.items() if key not in piecewise and not _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _read_opaque(shards: list[OptimizerShard], index: dict[str, Any], checkpoint: Path) -> dict[int, dict[str, Any]]:
    if index["ranks"] == dist.get_world_size():
        saved = torch.load(checkpoint / _opaque_name(dist.get_rank()), weights_only=True)
        if saved["pieces"] == _pieces(shards):
            found: dict[int, dict[str, Any]] = saved["states"]
            return found
    raise CheckpointError(
        f"{checkpoint.name} was saved by {index['ranks']} ranks",
        f"the state of {index['optimizer']} cannot be repartitioned",
        "Use the same number of ranks and ZeRO stage, or export the checkpoint and start a new run.",
    )


def _opaque_name(rank: int) -> str:
    return f"{STATE_FOLDER}/opaque_rank_{rank:05d}.pt"


def _pieces(shards: list[OptimizerShard]) -> list[list[tuple[Any, ...]]]:
    return [[astuple(piece) for piece in shard.pieces] for shard in shards]


def _step_counter(shard: OptimizerShard) -> dict[str, Any]:
    """Return the dict with the step count: the state or, for apex's Adam, the group. DeepSpeed's Adam has both, but
    never updates the group's."""
    return shard.state if STEP in shard.state else shard.settings


def _steps_taken(shards: list[OptimizerShard]) -> list[float | None]:
    """Return the steps of each parameter group; None before the first step."""
    found: list[float | None] = [None] * (1 + max(shard.group for shard in shards))
    for shard in shards:
        taken = _step_counter(shard).get(STEP)
        if taken is not None:
            found[shard.group] = float(taken)
    return found


def _set_steps_taken(shard: OptimizerShard, steps: float) -> None:
    counter = _step_counter(shard)
    taken = counter.get(STEP)
    if isinstance(taken, Tensor):
        taken.fill_(steps)
    elif taken is not None:
        counter[STEP] = type(taken)(steps)


def _kind(engine: Any) -> str:
    kind: str = engine.optimizer.param_groups[0][KIND_KEY]
    return kind


def _shapes(engine: Any) -> dict[str, list[int]]:
    """Return the shapes of all parameters, by name. ZeRO 3 leaves empty tensors in the model."""
    return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in engine.module.named_parameters()}


def _create_states(shard: OptimizerShard) -> None:
    """Create the states of a new optimizer by a step with zero gradients, because optimizers create them in their
    first step, each differently. The caller overwrites the changed weights."""
    if shard.state:
        return
    optimizer, gradient = shard.optimizer, shard.tensor.grad
    parameters = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        shard.settings["params"] = [shard.tensor]
        shard.tensor.grad = torch.zeros_like(shard.tensor)
        type(optimizer).step(optimizer)  # bypasses a step method that was replaced in the instance (step_gate.py)
    finally:
        shard.tensor.grad = gradient
        for group, before in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = before


def _replay_cpu_adam(shards: list[OptimizerShard]) -> None:
    """Set the powers of beta that DeepSpeed's CPU Adam keeps in C++ to the values of an uninterrupted run.

    It multiplies them in every step, once for all tensors, and computes them with `pow` if a step does not follow the
    one before. The last bit differs, and the resumed run drifts from the uninterrupted one (measured: 4e-9 in the loss
    of the next step). The values cannot be set, so the steps are repeated on an unused number: some microseconds each.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    stepped = next((shard for shard in shards if isinstance(shard.optimizer, DeepSpeedCPUAdam) and shard.state), None)
    if stepped is None:
        return
    adam: Any = stepped.optimizer
    weight, gradient, moment, square = torch.zeros(4, 1).unbind()
    (beta1, beta2), eps = adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]
    for step in range(1, int(stepped.state[STEP]) + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, True, weight, gradient, moment, square
        )
