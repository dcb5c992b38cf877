"""Rank and world-size numbers, read once from the environment that the launcher sets."""

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
    """Return srun's numbers for this task under the names that torch and DeepSpeed read.

    Call this only in ranks started by srun: the variables are also set in other situations.
    """
    tasks = tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])
    numbers = {name: environment[theirs] for name, theirs in SLURM_NAMES.items()}
    return {**numbers, "LOCAL_WORLD_SIZE": str(tasks[int(environment["SLURM_NODEID"])])}


def tasks_of_nodes(written: str) -> list[int]:
    """Parse Slurm's notation: `2(x3),1` is 2, 2, 2, 1. Return an empty list for any other form."""
    found: list[int] = []
    for part in written.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if not match:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


@dataclass(frozen=True)
class World:
    """The rank of this process and the number of processes, in the run and on this node."""

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
        """Return the World of a rank; mpirun's variables are also set under the names torch and DeepSpeed read."""
        if "RANK" not in os.environ:
            for name, theirs in OPENMPI_NAMES.items():
                if theirs in os.environ:
                    os.environ[name] = os.environ[theirs]
        return cls.from_environment()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "World":
        """Read the variables set by the deepspeed launcher and torchrun; without them, the world size is 1."""
        world_size = int(environment.get("WORLD_SIZE", "1"))
        local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or str(world_size)
        return cls(
            rank=int(environment.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_world_size=int(local_size),
        )
