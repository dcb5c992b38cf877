"""Reads folders written by DeepSpeed's own `engine.save_checkpoint(folder, tag)`, as pieces of named parameters.

| saved under | weights and optimizer are in | a shard is |
|---|---|---|
| ZeRO 0 | mp_rank_00_model_states.pt | a parameter |
| ZeRO 1 and 2 | [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt | rank R's partition of concatenated parameters |
| ZeRO 3 | the same | rank R's partitions of some parameters, concatenated |

`param_shapes` in the model's file lists the concatenated parameters of each shard. The files are pickles of DeepSpeed's
classes: four of them are allowed by name, and no other code in the files is run (`weights_only`). Tensors are
memory-mapped.
"""

import math
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from z2all_ds.base.errors import CheckpointError
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.checkpoint.layout import WEIGHT
from z2all_ds.model.stock_keys import STOCK_PARTS
from z2all_ds.zero.optimizers.registry import ADAMS, KIND_KEY
from z2all_ds.zero.state.optimizer_shards import ParameterPiece, pieces_between, share_of

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
FIRST_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Model file under ZeRO 0 to 2, and under ZeRO 3, where each rank writes one."""


@dataclass(frozen=True)
class SavedShard:
    """One tensor that an optimizer updated, with its states, all one-dimensional."""

    pieces: list[ParameterPiece]
    tensors: dict[str, Tensor]
    """WEIGHT and, after the first step, the moments."""
    steps_taken: float | None


@dataclass(frozen=True)
class _States:
    """The state dict of a torch optimizer, by number of the shard."""

    by_number: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]

    @property
    def group_by_number(self) -> list[dict[str, Any]]:
        return [group for group in self.groups for _ in group["params"]]

    def of(self, number: int) -> tuple[dict[str, Tensor], float | None]:
        """Return moments and step count of a shard."""
        state, group = self.by_number.get(number, {}), self.group_by_number[number]
        taken = state.get(STEP, group.get(STEP)) if state else None  # apex has one count per group
        if taken == 0 and STEP in group:  # DeepSpeed's FusedAdam counts only at the last tensor of a group
            counts = [self.by_number.get(one, {}).get(STEP, 0) for one in group["params"]]
            taken = counts[-1] if not any(counts[:-1]) else taken
        moments = {key: state[key].reshape(-1) for key in MOMENTS if key in state}
        return moments, None if taken is None else float(taken)


class DeepSpeedFolder:
    """The folder of one tag."""

    def __init__(self, path: Path) -> None:
        self.path = _folder_of_tag(path)
        first = next((name for name in FIRST_MODEL_FILES if (self.path / name).is_file()), None)
        if first is None:
            raise CheckpointError(
                f"{path}",
                "was not written by DeepSpeed's save_checkpoint (no file `latest`, no mp_rank_00_model_states.pt)",
                "Give the folder passed to save_checkpoint, or the folder of a tag in it.",
            )
        self._checked = set[str]()
        self._model = self._load(first)
        if not all(key in self._model for key in ("module", "param_shapes", *COUNTERS)):
            raise CheckpointError(f"{self.path / first}", "is not a model file of DeepSpeed", "Give another folder.")
        if self._model.get("mp_world_size", 1) > 1:
            rule = f"was saved by {self._model['mp_world_size']} ranks of tensor or pipeline parallelism"
            raise CheckpointError(f"{self.path}", rule, "Only data parallelism (ZeRO 0 to 3) can be imported.")
        self.is_partitioned = self._model["param_shapes"] is not None
        """Whether the ZeRO stage is above 0."""
        self._first_optimizer = self._optimizer_of(0) if self.is_partitioned else self._model.get("optimizer") or {}
        self._first_states = self._states(self._first_optimizer)

    @property
    def client_state(self) -> dict[str, Any]:
        """The entries that the saving program added, together with DeepSpeed's own."""
        return self._model

    @property
    def counters(self) -> dict[str, int]:
        return {name: int(self._model[name]) for name in COUNTERS}

    @property
    def zero_stage(self) -> int:
        # BF16_Optimizer, which is stage 1, does not store it.
        return int(self._first_optimizer.get("zero_stage", 1)) if self.is_partitioned else 0

    @property
    def ranks(self) -> int:
        """Number of partitions."""
        count = self._first_optimizer["partition_count"] if self.is_partitioned else 1
        return int(max(count) if isinstance(count, list | tuple) else count)

    @property
    def is_offloaded(self) -> bool:
        settings = self._model.get("ds_config")
        zero = settings.get("zero_optimization", {}) if isinstance(settings, dict) else {}
        return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"

    @property
    def dtype(self) -> str:
        """Compute dtype of the model."""
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return names[next(iter(self._model["module"].values())).dtype]

    @property
    def optimizer_kind(self) -> str:
        """One of `ADAMS`; others are refused when the folder is opened."""
        return str(self._first_states.groups[0].get(KIND_KEY, "adamw"))

    @property
    def loss_scaler(self) -> Any:
        return self._first_optimizer.get("loss_scaler") if self.is_partitioned else None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of all parameters under the names of this package, without a tied head."""
        found: dict[str, list[int]] = {}
        for name, shape in self._saved_shapes.items():
            ours, _ = self._places[name]
            rows = shape[:1] if ours not in found else [found[ours][0] + shape[0]]
            found[ours] = [*rows, *shape[1:]]
        return found

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        """Saved name -> name in this package, and position of its first value there: the matrices of a stock Llama are
        parts of fused ones."""
        found = {name: (name, 0) for name in self._saved_shapes}
        for fused, parts in STOCK_PARTS.items():
            for name in [name for name in found if f".{parts[0]}." in name]:
                names, start = [name.replace(parts[0], part) for part in parts], 0
                for one in names if all(one in found for one in names) else ():
                    found[one] = (name.replace(parts[0], fused), start)
                    start += math.prod(self._saved_shapes[one])
        return found

    @cached_property
    def _saved_shapes(self) -> dict[str, list[int]]:
        if self.is_partitioned:
            return {name: list(shape) for row in self._model["param_shapes"] for name, shape in row.items()}
        shared = set[int]()
        found = {}
        for name, tensor in self._model["module"].items():
            if tensor.data_ptr() not in shared and name not in self._model["buffer_names"]:
                shared.add(tensor.data_ptr())
                found[name] = list(tensor.shape)
        return found

    def shards(self, rank: int) -> Iterator[SavedShard]:
        """Yield the shards of a rank, with the names of this package."""
        for shard in self._saved_shards(rank):
            places = [(*self._places[piece.name], piece) for piece in shard.pieces]
            pieces = [ParameterPiece(name, first + one.start, one.offset, one.length) for name, first, one in places]
            yield replace(shard, pieces=pieces)

    def _saved_shards(self, rank: int) -> Iterator[SavedShard]:
        if not self.is_partitioned:
            yield from self._whole_parameters()
            return
        optimizer = self._optimizer_of(rank)
        states = self._states(optimizer)
        masters = optimizer["fp32_flat_groups" if self.zero_stage == 3 else "single_partition_of_fp32_groups"]
        rows = [{name: math.prod(shape) for name, shape in row.items()} for row in self._model["param_shapes"]]
        if not len(rows) == len(masters) == len(states.group_by_number):
            raise self._unknown(f"{len(masters)} shards for {len(rows)} lists of parameters")
        for number, (master, row) in enumerate(zip(masters, rows, strict=True)):
            is_stage_3 = self.zero_stage == 3
            pieces = self._shares(rank, row) if is_stage_3 else self._partition(rank, number, row, optimizer)
            moments, taken = states.of(number)
            tensors = {WEIGHT: master.detach().view(-1), **moments}
            needed = max((piece.offset + piece.length for piece in pieces), default=0)
            for key, tensor in tensors.items():
                if tensor.numel() < needed:
                    raise self._unknown(f"{tensor.numel()} values of {key} instead of {needed}")
            yield SavedShard(pieces, tensors, taken)

    # Positions of the parameters

    def _partition(
        self, rank: int, number: int, row: dict[str, int], optimizer: dict[str, Any]
    ) -> list[ParameterPiece]:
        """ZeRO 1 and 2: concatenated parameters are divided into equal partitions, one per rank."""
        master = optimizer["single_partition_of_fp32_groups"][number]
        # BF16_Optimizer saves the padding after the last parameter too, ZeRO's optimizer does not.
        cut_off = optimizer["group_paddings"][number] if "zero_stage" in optimizer else 0
        begin = rank * (master.numel() + cut_off)
        gaps = (optimizer.get("param_alignment_paddings") or {number: [0] * len(row)})[number]
        starts = accumulate((numel + gap for numel, gap in zip(row.values(), gaps, strict=True)), initial=0)
        located = ((name, start, numel) for (name, numel), start in zip(row.items(), starts, strict=False))
        return pieces_between(located, begin, begin + master.numel())

    def _shares(self, rank: int, row: dict[str, int]) -> list[ParameterPiece]:
        """ZeRO 3: each parameter is divided into equal shares; the shares of a rank are concatenated."""
        pieces, offset = [], 0
        for name, numel in row.items():
            share = -(-numel // self.ranks)
            pieces += share_of(name, numel, rank, share, offset)
            offset += share
        return pieces

    def _whole_parameters(self) -> Iterator[SavedShard]:
        """ZeRO 0: in fp32 the weights of the model, in 16 bits the master weights of the optimizer, by number."""
        states, weights = self._first_states, self._model["module"]
        names = self._names_by_number(states)
        masters = [master for group in self._first_optimizer.get("fp32_groups", ()) for master in group]
        for number, (name, master) in enumerate(zip(names, masters or map(weights.get, names), strict=True)):
            moments, taken = states.of(number)
            weight = master.detach().reshape(-1)
            yield SavedShard([ParameterPiece(name, 0, 0, weight.numel())], {WEIGHT: weight, **moments}, taken)

    def _names_by_number(self, states: _States) -> list[str]:
        """Return the names of the parameters, which torch's state dict replaces by numbers. Supported: named
        parameters, one group, or matrices before the rest; the shapes of the moments must agree."""
        if all("param_names" in group for group in states.groups):
            return [name for group in states.groups for name in group["param_names"]]
        shapes = self._saved_shapes
        in_order = list(shapes)
        split = [name for name in in_order if len(shapes[name]) >= 2] + [n for n in in_order if len(shapes[n]) < 2]
        names = in_order if len(states.groups) == 1 else split
        found = [list(state[key].shape) for _, state in sorted(states.by_number.items()) for key in MOMENTS]
        if len(states.group_by_number) != len(names) or (
            found and found != [shapes[name] for name in names for _ in MOMENTS]
        ):
            raise self._unknown("parameter groups whose parameters cannot be identified")
        return names

    # Files

    def _optimizer_of(self, rank: int) -> dict[str, Any]:
        names = [f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for kind in ("", "bf16_")]
        there = [name for name in names if (self.path / name).is_file()]
        if len(there) != 1:
            rule = f"the file of rank {rank} is missing" if not there else "it has files of two saves"
            raise CheckpointError(f"{self.path}", f"is incomplete: {rule} ({names[0]})", "Give a complete folder.")
        content = self._load(there[0]).get("optimizer_state_dict")
        if not isinstance(content, dict) or "partition_count" not in content:
            raise CheckpointError(f"{self.path / there[0]}", "has no ZeRO optimizer", "Give another folder.")
        return content

    def _states(self, optimizer: dict[str, Any]) -> _States:
        """Return the states of the wrapped optimizer, which must be an Adam."""
        content = optimizer
        for key in ("base_optimizer_state", "optimizer_state_dict"):
            content = content.get(key, content)
        if not isinstance(content, dict) or "state" not in content or "param_groups" not in content:
            raise self._unknown("no optimizer of ZeRO or torch")
        if "fp32_groups_flat" in optimizer:
            raise self._unknown("a 16-bit optimizer without ZeRO that updates flat groups (FusedAdam)")
        states = _States(content["state"], content["param_groups"])
        kind = states.groups[0].get(KIND_KEY)
        others = {key for state in states.by_number.values() for key in state} - {STEP, *MOMENTS}
        is_adam = all("betas" in group and "max_coeff" not in group for group in states.groups)  # of Lamb
        if others or not is_adam or (kind is not None and kind not in ADAMS):
            what = f"kind {kind}" if kind else f"states {', '.join(sorted(others)) or 'unlike Adam'}"
            raise CheckpointError(
                f"{self.path}: an optimizer with {what}",
                f"only Adam's two moments can be imported ({', '.join(sorted(ADAMS))})",
                "Export its weights and start a new run with train.init_from.",
            )
        return states

    def _load(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            if name not in self._checked and zipfile.is_zipfile(path):  # else an old format without checksums
                with zipfile.ZipFile(path) as archive:  # torch does not compare the checksums
                    damaged = archive.testzip()
                self._checked.add(name)
                if damaged is not None:
                    raise ValueError(f"{damaged} does not match its checksum")
            with torch.serialization.safe_globals(_classes_in_files()):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            rule = f"has objects of {found[1]}, which are not loaded" if found else "is not a file of torch.save"
            raise CheckpointError(f"{path}", rule, "Save it again without them in client_state.") from None
        except (RuntimeError, EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path}", f"cannot be read ({first_line})", "Give a complete copy.") from None
        return content if isinstance(content, dict) else {}

    def _unknown(self, what: str) -> CheckpointError:
        offloaded = (self.path / "offloaded_tensors").is_dir()
        fix = "Save it without offload to nvme." if offloaded else "Save it with DeepSpeed 0.19."
        return CheckpointError(f"{self.path}", f"has {what}", fix)


def _folder_of_tag(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}", "no such folder", "Give the folder DeepSpeed's save_checkpoint wrote.")
    latest = path / "latest"
    if not latest.is_file():
        return path
    tag = path / read_regular(latest).decode(errors="replace").strip()
    if not tag.is_dir():
        raise CheckpointError(f"{latest}", f"names {tag.name}, which does not exist", "Give the folder of another tag.")
    return tag


def _classes_in_files() -> list[Any]:
    """Return the classes in DeepSpeed's files other than tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, (_enum_member, "builtins.getattr")]


def _enum_member(kind: Any, name: str) -> Enum:
    """Return a member of an enum. Early versions of Python 3.11 pickle it as a call of `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError("GLOBAL getattr")
    return kind[name]
