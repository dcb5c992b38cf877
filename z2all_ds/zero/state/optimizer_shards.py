"""Where DeepSpeed keeps what the optimizer steps: under each ZeRO stage other flat tensors, each made of pieces of
named parameters. Cut into pieces, the state of one shape (stage, offload, ranks) is that of every other.

| engine.optimizer | a flat tensor is | lies |
|---|---|---|
| torch's own (stage 0) | a parameter, the same on all ranks | where the model is |
| ZeRO 1 and 2 | this rank's share of a group | there, or in the host's memory |
| BF16_Optimizer (ZeRO 1 with fp32 sums) | the same, with other names | where the model is |
| ZeRO 3 | this rank's shares of some parameters | there, in the host's memory, or in files |
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from z2all_ds.base.errors import CheckpointError


@dataclass(frozen=True)
class ParameterPiece:
    """So many elements of a parameter (flattened), and where they lie in a flat tensor."""

    name: str
    start: int
    """In the parameter."""
    offset: int
    """In the flat tensor."""
    length: int

    def share(self, rank: int, ranks: int) -> "ParameterPiece":
        """The part of a replica that one of its holders writes."""
        begin, end = self.length * rank // ranks, self.length * (rank + 1) // ranks
        return ParameterPiece(self.name, self.start + begin, self.offset + begin, end - begin)


def pieces_between(row: Iterable[tuple[str, int, int]], begin: int, end: int) -> list[ParameterPiece]:
    """Returns the pieces in one partition of a row of parameters, each a name, a start in the row and a length."""
    cut = [(name, start, max(start, begin), min(start + length, end)) for name, start, length in row]
    return [
        ParameterPiece(name, first - start, first - begin, last - first)
        for name, start, first, last in cut
        if first < last
    ]


def share_of(name: str, numel: int, rank: int, share: int, offset: int) -> list[ParameterPiece]:
    """Returns a rank's equal share of one parameter; the last ranks may have padding, or nothing else."""
    length = min(share, numel - rank * share)
    return [ParameterPiece(name, rank * share, offset, length)] if length > 0 else []


def _in_memory(will_change: bool) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class OptimizerShard:
    """One tensor that an optimizer steps on this rank: master weights, and the key of their states."""

    tensor: Tensor
    numel: int
    """Of the tensor, which is empty while it lies in a file."""
    optimizer: torch.optim.Optimizer
    group: int
    """Number of its parameter group."""
    pieces: list[ParameterPiece]
    is_replica: bool = False
    """All ranks hold the same."""
    resident: Callable[[bool], AbstractContextManager[None]] = _in_memory
    """Within it the tensor and its states are in memory; given True, what was changed there is kept."""
    after_change: Callable[[], None] = field(default=lambda: None)
    """To be called while it is resident."""

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state.get(self.tensor) or {}

    @property
    def settings(self) -> dict[str, Any]:
        """Its parameter group."""
        found: dict[str, Any] = self.optimizer.param_groups[self.group]
        return found

    def to_write(self) -> list[ParameterPiece]:
        if not self.is_replica:
            return self.pieces
        shares = (piece.share(dist.get_rank(), dist.get_world_size()) for piece in self.pieces)
        return [piece for piece in shares if piece.length]


def optimizer_shards_of(engine: Any) -> list[OptimizerShard]:
    """All that this rank steps."""
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _of_stage_3(optimizer, names)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        flats, groups = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
        return _of_partitions(optimizer, names, flats, groups, optimizer.round_robin_bit16_offsets)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        groups = optimizer.bf16_groups
        return _of_partitions(optimizer, names, optimizer.fp32_groups_flat_partition, groups, map(_offsets, groups))
    if isinstance(optimizer, torch.optim.Optimizer):
        return [
            OptimizerShard(
                weight,
                weight.numel(),
                optimizer,
                number,
                [ParameterPiece(names[id(weight)], 0, 0, weight.numel())],
                True,
            )
            for number, group in enumerate(optimizer.param_groups)
            for weight in group["params"]
        ]
    kind = type(optimizer).__name__
    raise CheckpointError(f"DeepSpeed's {kind}", "is not known to checkpoints", "Use another JSON or precision.")


@contextmanager
def weights_changed(engine: Any) -> Iterator[None]:
    """Around changes of master weights: afterwards the model computes with them. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.checkpoint_event_prologue()  # weights that are kept whole on every rank are divided again
        yield
        optimizer.checkpoint_event_epilogue()
    else:
        yield
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()


def _offsets(group: list[Tensor]) -> list[int]:
    """Of parameters that lie one after the other."""
    return list(accumulate((weight.numel() for weight in group[:-1]), initial=0))


def _of_partitions(
    optimizer: Any, names: dict[int, str], flats: Any, groups: Any, offsets: Any
) -> list[OptimizerShard]:
    """The group's parameters lie in a row, which is cut into equal partitions, one a rank."""
    found = []
    for number, (tensor, group, starts) in enumerate(zip(flats, groups, offsets, strict=True)):
        begin = dist.get_rank(group=optimizer.real_dp_process_group[number]) * tensor.numel()
        row = [(names[id(weight)], start, weight.numel()) for weight, start in zip(group, starts, strict=True)]
        pieces = pieces_between(row, begin, begin + tensor.numel())
        found.append(OptimizerShard(tensor, tensor.numel(), optimizer.optimizer, number, pieces))
    return found


def _of_stage_3(optimizer: Any, names: dict[int, str]) -> list[OptimizerShard]:
    """Each parameter is cut into equal partitions; of several parameters they lie in a row."""
    found = []
    for number, (tensor, weights) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    ):
        pieces = []
        for weight in weights:
            _, offset, share = optimizer.grad_position[optimizer.get_param_id(weight)]
            rank = dist.get_rank(group=weight.ds_process_group)
            pieces += share_of(names[id(weight)], weight.ds_numel, rank, share, offset)
        found.append(
            OptimizerShard(
                tensor,
                int(optimizer.fp16_partitioned_groups_flat_numel[number]),
                _stepping(optimizer, number),
                optimizer.sub_group_to_group_id[number],
                pieces,
                resident=_from_file(optimizer, number),
                after_change=partial(optimizer._reassign_or_swap_out_partitioned_parameters, number),
            )
        )
    return found


def _stepping(optimizer: Any, number: int) -> torch.optim.Optimizer:
    """With an offload of some part only, the rest has an optimizer of its own."""
    offloads = optimizer.offload_optimizer and optimizer.subgroup_to_device[number] != "cpu"
    found: torch.optim.Optimizer = optimizer.backup_optimizer if offloads else optimizer.optimizer
    return found


def _from_file(optimizer: Any, number: int) -> Callable[[bool], AbstractContextManager[None]]:
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
