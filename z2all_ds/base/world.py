"""Rank and node numbers, each count with its name, read once from the environment the launcher sets."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

OPENMPI_NAMES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
SLURM_NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def slurm_numbers(environment: Mapping[str, str]) -> dict[str, str]:
    """What srun has told this task, by the names that torch and DeepSpeed read.

    For who knows that srun has started it as a rank: these variables are set in other places, too.
    """
    tasks = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    numbers = {name: environment[theirs] for name, theirs in SLURM_NAMES.items()}
    return {**numbers, "LOCAL_WORLD_SIZE": str(tasks[int(environment["SLURM_NODEID"])])}


def tasks_of_nodes(written: str) -> list[int]:
    """As slurm writes them: `2(x3),1` is 2, 2, 2, 1. Empty where it is not of that form."""
    found: list[int] = []
    for part in written.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if not match:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


@dataclass(frozen=True)
class World:
    """Where this process stands among all processes of the run."""

    rank: int = 0
    """Number of this process, 0 to world_size - 1."""
    world_size: int = 1
    """Number of processes in the run."""
    local_rank: int = 0
    """Number of this process on its node; also the number of its GPU."""
    local_world_size: int = 1
    """Number of processes on this node."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def take_from_environment(cls) -> "World":
        """For a rank: what mpirun calls by other names is also set by the names that torch and DeepSpeed read."""
        if "RANK" not in os.environ:
            for name, theirs in OPENMPI_NAMES.items():
                if theirs in os.environ:
                    os.environ[name] = os.environ[theirs]
        return cls.from_environment()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Reads what the deepspeed launcher and torchrun both set; alone, it is a world of one."""
        world_size = int(environment.get("WORLD_SIZE", "1"))
        local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or str(world_size)
        return cls(
            rank=int(environment.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_world_size=int(local_size),
        )
