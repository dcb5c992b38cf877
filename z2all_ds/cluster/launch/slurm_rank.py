"""A rank that srun has started: says by the usual names who it is, and becomes a rank like any other.

Only RUN/launch/rank.py comes here. Elsewhere SLURM_PROCID and the like mean nothing to us: a `z2all train` in a batch
script or in an interactive step has them too.
"""

import logging
import os
from collections.abc import Mapping

from z2all_ds.base.machine import default_environment
from z2all_ds.base.world import slurm_numbers


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What torch, DeepSpeed and `World` read, and what this node needs; the user's own settings came by srun."""
    numbers = slurm_numbers(environment)
    here = default_environment(int(numbers["LOCAL_WORLD_SIZE"]), environment)
    here.pop("GLOO_SOCKET_IFNAME", None)  # for one machine alone
    return {**here, **numbers}


def main() -> int:
    os.environ.update(rank_environment(os.environ))
    from z2all_ds.train import pretrain

    code = pretrain.main()
    logging.shutdown()
    return code
