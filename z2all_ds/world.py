"""Rank and node numbers, each count with its name, read once from the environment the launcher sets."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

OPENMPI_NAMES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


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
