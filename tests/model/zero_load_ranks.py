"""Script for the deepspeed launcher: loads stock Llama folders into ZeRO-3 partitions, runs the models and saves them.

The folder on the command line has one Llama folder per case, which transformers loads. Next to each, the last rank
writes its logits, and rank 0 the gathered weights: once with `save_pretrained` and once with DeepSpeed.
"""

import sys
from pathlib import Path

import torch

from tests.model.pairs import some_ids
from z2all_ds.base.world import World
from z2all_ds.model import Z2allForCausalLM

HEADLESS = "headless"
"""The case whose folder lacks the head, so that the head is initialised."""


def main(folder: Path) -> None:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    from z2all_ds.zero.engine import pick_device, start_process_group

    world = World.from_environment()
    start_process_group(world, pick_device(world))
    zero3 = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    kept_alive = HfDeepSpeedConfig(zero3)  # transformers keeps only a weak reference
    for stock in sorted(folder.glob("*-llama")):
        case = stock.name.removesuffix("-llama")
        model, info = Z2allForCausalLM.from_pretrained(stock, output_loading_info=True)
        missing = {"lm_head.weight"} if case == HEADLESS else set()
        assert set(info["missing_keys"]) == missing, info
        assert not any(found for name, found in info.items() if name != "missing_keys"), info
        for name, parameter in model.named_parameters():
            assert parameter.numel() == 0, f"{name} is whole on every rank"
            assert parameter.ds_numel > 0, name
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=kept_alive.config)
        engine.eval()
        with torch.no_grad():
            logits = engine(some_ids(2, 9)).logits
        if world.rank == world.world_size - 1:
            torch.save(logits, folder / f"{case}-logits.pt")
        state = engine._zero3_consolidated_16bit_state_dict()  # the method that transformers' Trainer calls
        if world.is_main:
            model.save_pretrained(folder / f"{case}-saved", state_dict=state)
        engine.save_16bit_model(str(folder / f"{case}-gathered"))
        engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
