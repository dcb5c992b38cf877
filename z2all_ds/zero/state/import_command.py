"""`z2all checkpoint import`: a folder of DeepSpeed's own, made the checkpoint from which a configured run goes on."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from z2all_ds.base.config import RunConfig, anchored, load_run_config
from z2all_ds.base.config.stages import run_stages, samples_seen
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.data.data_plan import DataPlan
from z2all_ds.data.run_spec import open_tokenizer, stream_spec
from z2all_ds.data.state import STATE_VERSION
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer

DATA_STATE_KEY = "data_state"
"""In client_state: a data state of ours, where a program that saves by DeepSpeed reads data by this package."""


@dataclass(frozen=True)
class Imported:
    """What was made, in words for people."""

    checkpoint: Path
    lines: list[str]


def run_to_go_on(run_dir: Path | None, config: str | None, overrides: list[str]) -> tuple[RunConfig, RunFolder]:
    """The run's config and folder: from the folder's run.yaml, from a config, or each from one of the two."""
    if run_dir is None and config is None:
        raise ConfigError("checkpoint import", "which run is to go on?", "Give --run RUN_FOLDER or --config run.yaml.")
    root = run_dir.expanduser().resolve() if run_dir else None
    if config is None and root is not None:
        written = RunFolder(root).config
        if not written.is_file():
            raise CheckpointError(f"{root}", "has no run.yaml", "Give the run's config too: --config run.yaml.")
        config = str(written)
    run = anchored(load_run_config(config, overrides))
    return run, RunFolder(root or Path(run.run_dir).expanduser().resolve())


def import_deepspeed(source: Path, run_dir: Path | None, config: str | None, overrides: list[str]) -> Imported:
    """Refuses what cannot go on, before anything is written."""
    run, folder = run_to_go_on(run_dir, config, overrides)
    tokenizer = open_tokenizer(run)
    os.environ["DS_ACCELERATOR"] = "cpu"  # files alone are at work, and DeepSpeed need not look for GPUs

    from z2all_ds.zero.state.deepspeed_folders import DeepSpeedFolder
    from z2all_ds.zero.state.importing import import_folder

    saved = DeepSpeedFolder(source.expanduser().resolve())
    data_state, about_data = _data_state(saved.client_state, saved.counters["global_steps"], run, tokenizer)
    lock = folder.acquire_lock()
    try:
        path = import_folder(saved, folder.checkpoints, _shapes(run, tokenizer), data_state, run.train.seed)
    finally:
        os.close(lock)
    stage = f"ZeRO {saved.zero_stage}, {saved.dtype}, {saved.ranks} {'rank' if saved.ranks == 1 else 'ranks'}"
    first = f"{path}: step {saved.counters['global_steps']} of {saved.path.name} ({stage})"
    return Imported(path, [first, about_data, f"random generators: seeded by train.seed={run.train.seed}"])


def _data_state(
    client_state: dict[str, Any], step: int, run: RunConfig, tokenizer: Z2allTokenizer
) -> tuple[dict[str, Any], str]:
    """As the source has it, else that of the step, with every lane at its first document.

    Samples count from the step, so that stages, mixture and the division to ranks are the run's. Which documents were
    read is not told by a step, and finding out would mean to read them all.
    """
    carried = client_state.get(DATA_STATE_KEY)
    if isinstance(carried, dict) and carried.get("version") == STATE_VERSION:
        return carried, f"data: goes on at sample {carried['position']}, as the source's client_state says"
    plan = DataPlan.open(replace(stream_spec(run), skip=()), tokenizer)
    position = samples_seen(run_stages(run), step)
    state = plan.state_at(position, plan.fresh_lanes(range(run.num_lanes)))
    return dict(state), f"data: counts on from sample {position}, reading from the first document of every domain"


def _shapes(run: RunConfig, tokenizer: Z2allTokenizer) -> dict[str, list[int]]:
    """Of the configured model's parameters."""
    import torch

    from z2all_ds.model import Z2allConfig, Z2allForCausalLM

    with torch.device("meta"):
        model = Z2allForCausalLM(Z2allConfig.from_section(run.model, **tokenizer.model_token_ids))
    return {name: list(weight.shape) for name, weight in model.named_parameters()}
