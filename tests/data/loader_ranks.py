"""A program run by two gloo ranks: each reads with two worker processes, and rank 0 saves the samples of both."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.data.corpus_maker import open_stream
from z2all_ds.data import BatchLoader, merge_states

MICRO_BATCH, STEPS = 4, 6


def main(corpus: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sequence = []
    with BatchLoader(open_stream(corpus, rank, world_size), MICRO_BATCH, num_workers=2) as loader:
        for _ in range(STEPS):
            ids = next(loader)["input_ids"]
            gathered = [torch.empty_like(ids) for _ in range(world_size)]
            dist.all_gather(gathered, ids)
            # [micro-batch, ranks, tokens], so that the ranks' samples alternate
            sequence += torch.stack(gathered, dim=1).reshape(-1, ids.shape[1]).tolist()
        states: list[Any] = [None] * world_size
        dist.all_gather_object(states, loader.state_dict())
    if rank == 0:
        out.write_text(json.dumps({"input_ids": sequence, "state": merge_states(states)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
