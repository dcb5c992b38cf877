"""Several ranks on one GPU: `python -m z2all_ds.bench.shared_gpu RANKS PORT MODULE ...`. For measurements alone.

NCCL refuses two ranks on one GPU of one machine; by different NCCL_HOSTIDs it takes them for two machines. What each
of them allocates is then what it would on a GPU of its own.
"""

import sys

from z2all_ds.train.processes.local_ranks import RANK_MODULE
from z2all_ds.train.processes.starter import rank_environment, start_and_wait


def shared_gpu_command(arguments: list[str], ranks: int, port: int) -> list[str]:
    return [sys.executable, "-m", "z2all_ds.bench.shared_gpu", str(ranks), str(port), RANK_MODULE, *arguments]


def own_machine_each(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As if every rank were the only one of its machine."""
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"z2all-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return {**rank_environment(rank, ranks, port), **alone}


if __name__ == "__main__":
    sys.exit(start_and_wait(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:], own_machine_each))
