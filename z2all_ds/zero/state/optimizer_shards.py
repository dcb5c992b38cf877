"""The tensors that the optimizer of an engine updates, and the pieces of named parameters that they consist of.

They differ between ZeRO stages. Divided into pieces of parameters, the state of one shape (stage, offload, ranks) can
be loaded into every other.

| engine.optimizer | a shard is | location |
|---|---|---|
| torch's own (stage 0) | a parameter, the same on all ranks | device of the model |
| ZeRO 1 and 2 | this rank's partition of a parameter group | device of the model, or host memory |
| BF16_Optimizer (ZeRO 1 with fp32 accumulation) | the same, with other attribute names | device of the model |
| ZeRO 3 | this rank's partitions of some parameters | device of the model, host memory, or files |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.checkpoint.state_files import Entry


@dataclass(frozen=True)
class ParameterPiece:
    """A range of a flattened parameter, and its position in a shard."""

    name: str
    start: int
    """In the parameter."""
    offset: int
    """In the shard."""
    length: int

    def of(self, values: Tensor) -> Tensor:
        """Return this piece of a flat tensor of the shard."""
        return values[self.offset : self.offset + self.length]

    def share(self, rank: int, ranks: int) -> "ParameterPiece":
        """Return the part of a replicated piece that one rank writes."""
        begin, end = self.length * rank // ranks, self.length * (rank + 1) // ranks
        return ParameterPiece(self.name, self.start + begin, self.offset + begin, end - begin)


def pieces_between(row: Iterable[tuple[str, int, int]], begin: int, end: int) -> list[ParameterPiece]:
    """Return the pieces in one partition of concatenated parameters, each given as name, start and length."""
    cut = [(name, start, max(start, begin), min(start + length, end)) for name, start, length in row]
    return [
        ParameterPiece(name, first - start, first - begin, last - first)
        for name, start, first, last in cut
        if first < last
    ]


def share_of(name: str, numel: int, rank: int, share: int, offset: int) -> list[ParameterPiece]:
    """Return a rank's equal share of one parameter; on the last ranks it may be partly or entirely padding."""
    length = min(share, numel - rank * share)
    return [ParameterPiece(name, rank * share, offset, length)] if length > 0 else []


def entries_of(tensors: Mapping[str, Tensor], pieces: list[ParameterPiece]) -> list[Entry]:
    """Return the entries for the pieces of a shard's tensors, which are given by key."""
    return [
        Entry(key, piece.name, piece.start, piece.length, tensor.dtype)
        for key, tensor in tensors.items()
        for piece in pieces
    ]


def _in_memory(will_change: bool) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class OptimizerShard:
    """One tensor that the optimizer updates on this rank: master weights, and the key of their states."""

    tensor: Tensor
    numel: int
    """Size of the tensor, which is empty while offloaded to a file."""
    optimizer: torch.optim.Optimizer
    group: int
    """Index of its parameter group."""
    pieces: list[ParameterPiece]
    is_replica: bool = False
    """Whether all ranks hold the same tensor."""
    resident: Callable[[bool], AbstractContextManager[None]] = _in_memory
    """Context in which the tensor and its states are in memory; with True, changes to them are kept."""
    after_change: Callable[[], None] = lambda: None
    """Called after a change, while resident."""

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state.get(self.tensor) or {}

    @property
    def settings(self) -> dict[str, Any]:
        """The parameter group of this shard."""
        found: dict[str, Any] = self.optimizer.param_groups[self.group]
        return found

    def pieces_to_write(self) -> list[ParameterPiece]:
        if not self.is_replica:
            return self.pieces
        shares = (piece.share(dist.get_rank(), dist.get_world_size()) for piece in self.pieces)
        return [piece for piece in shares if piece.length]


def optimizer_shards_of(engine: Any) -> list[OptimizerShard]:
    """Return all shards of this rank."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _shards_of_stage_3(optimizer, names)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        tensors, groups = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
        return _partitions(optimizer, names, tensors, groups, optimizer.round_robin_bit16_offsets)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        groups = optimizer.bf16_groups
        offsets = [list(accumulate((weight.numel() for weight in group[:-1]), initial=0)) for group in groups]
        return _partitions(optimizer, names, optimizer.fp32_groups_flat_partition, groups, offsets)
    if isinstance(optimizer, torch.optim.Optimizer):
        return [
            OptimizerShard(weight, size, optimizer, number, [ParameterPiece(names[id(weight)], 0, 0, size)], True)
            for number, group in enumerate(optimizer.param_groups)
            for weight in group["params"]
            for size in [weight.numel()]
        ]
    kind = type(optimizer).__name__
    raise CheckpointError(f"DeepSpeed's {kind}", "is not supported by checkpoints", "Use another JSON or precision.")


@contextmanager
def weights_changed(engine: Any) -> Iterator[None]:
    """Context for changes of master weights; at its end the model uses them. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.checkpoint_event_prologue()  # partitions weights that are persistent on every rank
        yield
        optimizer.checkpoint_event_epilogue()
    else:
        yield
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()


def _partitions(optimizer: Any, names: dict[int, str], tensors: Any, groups: Any, offsets: Any) -> list[OptimizerShard]:
    """Stages 1 and 2: the concatenated parameters of a group are divided into equal partitions, one per rank."""
    found = []
    for number, (tensor, group, starts) in enumerate(zip(tensors, groups, offsets, strict=True)):
        begin = dist.get_rank(group=optimizer.real_dp_process_group[number]) * tensor.numel()
        row = [(names[id(weight)], start, weight.numel()) for weight, start in zip(group, starts, strict=True)]
        pieces = pieces_between(row, begin, begin + tensor.numel())
        found.append(OptimizerShard(tensor, tensor.numel(), optimizer.optimizer, number, pieces))
    return found


def _shards_of_stage_3(optimizer: Any, names: dict[int, str]) -> list[OptimizerShard]:
    """Stage 3: each parameter is divided into equal partitions; those of several parameters are concatenated."""
    found = []
    for number, (tensor, weights) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    ):
        pieces = []
        for weight in weights:
            _, offset, share = optimizer.grad_position[optimizer.get_param_id(weight)]
            rank = dist.get_rank(group=weight.ds_process_group)
            pieces += share_of(names[id(weight)], weight.ds_numel, rank, share, offset)
        # With partial offload, the shards that stay on the device have an optimizer of their own.
        is_on_device = optimizer.offload_optimizer and optimizer.subgroup_to_device[number] != "cpu"
        found.append(
            OptimizerShard(
                tensor,
                int(optimizer.fp16_partitioned_groups_flat_numel[number]),
                optimizer.backup_optimizer if is_on_device else optimizer.optimizer,
                optimizer.sub_group_to_group_id[number],
                pieces,
                resident=_swapped_in(optimizer, number),
                after_change=partial(optimizer._reassign_or_swap_out_partitioned_parameters, number),
            )
        )
    return found


def _swapped_in(optimizer: Any, number: int) -> Callable[[bool], AbstractContextManager[None]]:
    if not optimizer._swappable_optimizer_subgroup(number):
        return _in_memory

    @contextmanager
    def resident(will_change: bool) -> Iterator[None]:
        optimizer._optimizer_states_and_gradient_swap_in(number)
        yield
        if will_change:
            optimizer._writeback_swap_state(number, write_opt_state=True, write_gradients=False)
        else:
            optimizer._release_swap_buffers(number)

    return resident
