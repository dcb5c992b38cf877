"""Several ranks on one GPU, for measurements only: `python -m z2all_ds.bench.shared_gpu RANKS PORT MODULE ...`.

NCCL refuses two ranks on one GPU of one machine; with different NCCL_HOSTIDs it takes them for two machines. Each rank
then allocates what it would allocate on a GPU of its own.
"""

import sys

from z2all_ds.base.child_process import module_command
from z2all_ds.train.processes.local_ranks import RANK_MODULE
from z2all_ds.train.processes.starter import rank_environment, start_and_wait


def shared_gpu_command(arguments: list[str], ranks: int, port: int) -> list[str]:
    """Return the command that starts a training run with all ranks on one GPU."""
    return module_command("z2all_ds.bench.shared_gpu", str(ranks), str(port), RANK_MODULE, *arguments)


def separate_machine_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that appears to be the only one of its machine."""
    only = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"z2all-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return {**rank_environment(rank, ranks, port), **only}


if __name__ == "__main__":
    _, ranks, port, module, *rest = sys.argv
    sys.exit(start_and_wait(int(ranks), int(port), module, rest, separate_machine_environment))
