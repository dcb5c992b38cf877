"""Script for the deepspeed launcher: builds models under the real `zero.Init`, initialises and saves them."""

import sys
from pathlib import Path
from typing import Any

import torch

from tests.model.pairs import tiny_config
from z2all_ds.base.world import World
from z2all_ds.model import Z2allForCausalLM
from z2all_ds.model.initialization import initialise_weights

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied-padded": {"tie_word_embeddings": True, "pad_token_id": 3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    # an odd number of rows
    "odd": {"vocab_size": 61, "intermediate_size": 61},
}
SEED = 11
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(folder: Path) -> None:
    import deepspeed  # imported here, because the test imports the cases above
    from deepspeed.runtime.zero import GatheredParameters

    from z2all_ds.zero.engine import pick_device, start_process_group

    world = World.from_environment()
    start_process_group(world, pick_device(world))
    rank, ranks = world.rank, world.world_size
    for dtype_name in DTYPES:
        for case, changes in CASES.items():
            torch.manual_seed(1000 * rank)  # the random state of torch on this rank must not matter
            # The config sets the dtype, as in training: zero.Init ignores its dtype argument on a CPU without fp16.
            bf16 = {"enabled": dtype_name == "bf16"}
            zero3 = {"train_batch_size": ranks, "zero_optimization": {"stage": 3}, "bf16": bf16}
            with deepspeed.zero.Init(config_dict_or_path=zero3):
                model = Z2allForCausalLM(tiny_config(**changes))
            initialise_weights(model, SEED, lambda parameter: GatheredParameters(parameter, modifier_rank=0))
            state = {}
            for name, parameter in model.named_parameters(remove_duplicate=False):
                assert parameter.numel() == 0, f"{name} is not partitioned"
                with GatheredParameters(parameter):
                    state[name] = parameter.detach().clone()
            state["rotary frequencies"] = model.model.rotary.inverse_frequencies
            # The last rank saves, since its shard was sent to it by rank 0.
            if rank == ranks - 1:
                torch.save(state, folder / f"{case}-{dtype_name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
