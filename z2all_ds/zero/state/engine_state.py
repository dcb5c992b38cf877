"""The state of an engine, out into state files and back into an engine of any shape.

Every rank writes what it steps and reads what it will step. What belongs to single weights (master weights, moments)
is cut into pieces of parameters; what belongs to a whole flat tensor (codes and scales of 8-bit moments, rows and
columns of Adafactor) goes into a file of the rank and comes back only at the same shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.disk_file import Content
from z2all_ds.checkpoint.layout import STATE_FOLDER, WEIGHT
from z2all_ds.checkpoint.optimizer_compat import KIND_KEY, require_same_states
from z2all_ds.checkpoint.state_files import DTYPES, Entry, StateReader, build_index, file_name
from z2all_ds.zero.state.optimizer_shards import OptimizerShard, optimizer_shards_of, weights_changed

ENGINE_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
STEP = "step"
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What moves in DeepSpeed's scaler of fp16 losses; the rest are settings."""


@dataclass(frozen=True)
class RankState:
    """What one rank steps, as it goes into a checkpoint."""

    rank: int
    entries: list[Entry]
    shards: list[OptimizerShard]

    @property
    def name(self) -> str:
        """Path of its state file in a checkpoint."""
        return f"{STATE_FOLDER}/{file_name(self.rank)}"

    def tensors(self) -> Iterator[Tensor]:
        """One-dimensional, in the order of the entries."""
        for shard in self.shards:
            with shard.resident(False):
                for key in (WEIGHT, *_piecewise_keys(shard)):
                    values = _values(shard, key)
                    for piece in shard.to_write():
                        yield values[piece.offset : piece.offset + piece.length]

    def opaque_files(self) -> dict[str, Content]:
        """The file of states that belong to whole tensors; empty where there are none."""
        states = {number: found for number, shard in enumerate(self.shards) if (found := _opaque_states(shard))}
        content = {"pieces": _layout(self.shards), "states": states}
        return {f"{STATE_FOLDER}/{_opaque_name(self.rank)}": partial(torch.save, content)} if states else {}


def rank_state(engine: Any) -> RankState:
    """What this rank would save now."""
    shards = optimizer_shards_of(engine)
    return RankState(dist.get_rank(), [entry for shard in shards for entry in _entries(shard)], shards)


def index_of(engine: Any, entries_of_ranks: list[list[Entry]], is_opaque: bool) -> str:
    """Returns index.json."""
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
    """Weights, optimizer and counts, from a checkpoint of any shape. Collective."""
    reader = StateReader(checkpoint)
    index = reader.index
    require_same_states(index["optimizer"], _kind(engine))
    require_same_model(checkpoint.name, reader.shapes, "this model", _shapes(engine))
    flats = optimizer_shards_of(engine)
    opaque = _read_opaque(flats, index, checkpoint) if index["is_opaque"] else {}
    with weights_changed(engine), torch.no_grad():
        for number, flat in enumerate(flats):
            with flat.resident(True):
                if reader.state_keys or opaque:
                    _make_states(flat)
                _read_flat(flat, reader)
                for key, value in opaque.get(number, {}).items():
                    flat.state[key] = value.to(flat.tensor.device) if isinstance(value, Tensor) else value
                if (steps := index["steps_taken"][flat.group]) is not None:
                    _set_steps_taken(flat, steps)
                flat.after_change()
    for name, value in index["engine"].items():
        setattr(engine, name, value)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    _set_loss_scale(engine, index["loss_scale"])
    _replay_cpu_adam(flats)


def can_read(engine: Any, checkpoint: Path) -> bool:
    """Whether all files that hold what this rank steps are in the folder: on another node only its own may be."""
    reader = StateReader(checkpoint)
    ranks = {
        rank
        for flat in optimizer_shards_of(engine)
        for piece in flat.pieces
        for rank in reader.ranks_needed(piece.name, piece.start, piece.length)
    }
    return all((checkpoint / STATE_FOLDER / file_name(rank)).is_file() for rank in ranks)


def require_same_model(source: str, saved: dict[str, list[int]], here: str, ours: dict[str, list[int]]) -> None:
    """Refuses a source whose parameters have other names or shapes."""
    for name in sorted({*saved, *ours}):
        if saved.get(name) != ours.get(name):
            raise CheckpointError(
                f"{source} has {name} of {saved.get(name, 'no such weight')}",
                f"{here} has {ours.get(name, 'no such weight')}",
                "Set model.* as it was.",
            )


# What is written


def _entries(flat: OptimizerShard) -> list[Entry]:
    dtypes = {WEIGHT: flat.tensor.dtype, **{key: flat.state[key].dtype for key in _piecewise_keys(flat)}}
    return [
        Entry(key, piece.name, piece.start, piece.length, dtype)
        for key, dtype in dtypes.items()
        for piece in flat.to_write()
    ]


def _values(flat: OptimizerShard, key: str) -> Tensor:
    tensor = flat.tensor if key == WEIGHT else flat.state[key]
    return tensor.detach().view(-1)


def _piecewise_keys(flat: OptimizerShard) -> list[str]:
    """States with a value for each weight. While they lie in a file they are empty."""
    return [
        key
        for key, value in flat.state.items()
        if type(value) in (Tensor, nn.Parameter)
        and value.dtype in DTYPES
        and value.dim() > 0
        and value.numel() in (flat.numel, 0)
    ]


def _opaque_states(flat: OptimizerShard) -> dict[str, Any]:
    """The other tensors, but for plain numbers."""
    piecewise = set(_piecewise_keys(flat))
    return {key: value for key, value in flat.state.items() if key not in piecewise and not _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def _counting(flat: OptimizerShard) -> dict[str, Any]:
    """Who counts its steps: apex's Adam once for the whole group; DeepSpeed's keeps an old 0 there."""
    return flat.state if STEP in flat.state else flat.settings


def _steps_taken(flats: list[OptimizerShard]) -> list[float | None]:
    """By parameter group; None where nothing was stepped yet."""
    found: list[float | None] = [None] * (1 + max(flat.group for flat in flats))
    for flat in flats:
        taken = _counting(flat).get(STEP)
        if taken is not None:
            found[flat.group] = float(taken)
    return found


def _kind(engine: Any) -> str:
    kind: str = engine.optimizer.param_groups[0][KIND_KEY]
    return kind


def _shapes(engine: Any) -> dict[str, list[int]]:
    """By name. ZeRO 3 leaves an empty tensor where the weight was."""
    return {name: list(getattr(weight, "ds_shape", weight.shape)) for name, weight in engine.module.named_parameters()}


def loss_scale(scaler: Any) -> dict[str, float]:
    """What moves in DeepSpeed's scaler of losses; empty but for fp16."""
    return {name: getattr(scaler, name) for name in LOSS_SCALE} if getattr(scaler, "dynamic", False) else {}


def _layout(flats: list[OptimizerShard]) -> list[list[tuple[str, int, int, int]]]:
    return [[(piece.name, piece.start, piece.offset, piece.length) for piece in flat.pieces] for flat in flats]


def _opaque_name(rank: int) -> str:
    return f"opaque_rank_{rank:05d}.pt"


# What is read


def _make_states(flat: OptimizerShard) -> None:
    """Optimizers make their states in the first step, each in its own way. So the first step is taken, with gradients
    of zero; what it does to the weights is written over right after."""
    if flat.state:
        return
    optimizer, gradient = flat.optimizer, flat.tensor.grad
    parameters = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = []
        flat.settings["params"] = [flat.tensor]
        flat.tensor.grad = torch.zeros_like(flat.tensor)
        type(optimizer).step(optimizer)  # past whoever stands before the step of this one
    finally:
        flat.tensor.grad = gradient
        for group, before in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = before


def _read_flat(flat: OptimizerShard, reader: StateReader) -> None:
    for key in (WEIGHT, *_piecewise_keys(flat)):
        values = _values(flat, key)
        for piece in flat.pieces:
            reader.read_into(values[piece.offset : piece.offset + piece.length], key, piece.name, piece.start)


def _set_steps_taken(flat: OptimizerShard, steps: float) -> None:
    counting = _counting(flat)
    taken = counting.get(STEP)
    if isinstance(taken, Tensor):
        taken.fill_(steps)
    elif taken is not None:
        counting[STEP] = type(taken)(steps)


def _set_loss_scale(engine: Any, saved: dict[str, float]) -> None:
    """A run in fp16 that goes on from another precision begins with its own scale."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if loss_scale(scaler):
        for name, value in saved.items():
            setattr(scaler, name, value)


def _read_opaque(flats: list[OptimizerShard], index: dict[str, Any], checkpoint: Path) -> dict[int, dict[str, Any]]:
    path = checkpoint / STATE_FOLDER / _opaque_name(dist.get_rank())
    if index["ranks"] == dist.get_world_size():
        saved = torch.load(path, weights_only=True)
        if saved["pieces"] == _layout(flats):
            found: dict[int, dict[str, Any]] = saved["states"]
            return found
    raise CheckpointError(
        f"{checkpoint.name} was saved by {index['ranks']} ranks",
        f"the state of {index['optimizer']} cannot be divided anew",
        "Start with as many ranks and the same ZeRO stage, or export the checkpoint and begin a new run.",
    )


def _replay_cpu_adam(flats: list[OptimizerShard]) -> None:
    """Brings the powers of beta that DeepSpeed's CPU Adam keeps in C++ to where the unbroken run had them.

    It multiplies them from step to step, once for all tensors of a step, and computes them by `pow` where a step does
    not follow on the one before: another last bit, and the resumed run drifts from the unbroken one (seen: 4e-9 of loss
    one step later). Nothing of this can be read from it, so the steps are taken again, on one number that nobody uses:
    some microseconds each.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    stepped = next((flat for flat in flats if isinstance(flat.optimizer, DeepSpeedCPUAdam) and flat.state), None)
    if stepped is None:
        return
    adam: Any = stepped.optimizer
    weight, gradient, moment, square = torch.zeros(4, 1).unbind()
    (beta1, beta2), eps = adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]
    for step in range(1, int(stepped.state[STEP]) + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, True, weight, gradient, moment, square
        )
