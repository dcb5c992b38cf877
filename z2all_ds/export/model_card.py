"""Writes the README.md of an exported folder: how to load it, figures of the run, losses, and the verification.

Figures that the run folder does not have are left out.
"""

import json
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages, stage_at, tokens_seen
from z2all_ds.base.errors import DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.export.verify import LAYERWISE, Verdict
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.track.goodput import goodput
from z2all_ds.track.writer import read_records

VALIDATION = "validation_"
NAMES = {"llama": "A Z2all model in Llama format", "z2all": "A Z2all model"}
LOADING = {
    "llama": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")  # no remote code
tokenizer = AutoTokenizer.from_pretrained("FOLDER")""",
    "z2all": """from transformers import AutoTokenizer
from z2all_ds.model import Z2allForCausalLM  # pip install z2all_ds

model = Z2allForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")""",
}


def model_card(
    run: RunConfig,
    folder: RunFolder,
    checkpoint: Checkpoint,
    dtype: str,
    model_format: str,
    parameters: int,
    verdict: Verdict,
) -> str:
    """Return the content of the file."""
    with explain_content(DataError, f"run folder {folder.root}", "its records are damaged", "Repair or move them."):
        # Later records do not belong to this model; after a rollback, steps are repeated.
        records = list(takewhile(lambda record: record["step"] <= checkpoint.step, read_records(folder.metrics)))
        found = _run_facts(run, checkpoint, dtype, parameters) | _speed(folder, records) | _environment(folder)
        facts, losses = _table(("", ""), found.items()), _loss_table(records)
    generated = "".join(f"\n- `{prompt!r}` → `{text!r}`" for prompt, text in verdict.generated.items())
    parts = (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
        f"# {NAMES[model_format]}",
        f"```python\n{LOADING[model_format]}\n```",
        f"## The run\n\n{facts}",
        f"## Loss\n\n{losses}" if losses else "",
        f"## Verification\n\n{_verification(verdict, model_format)}",
        f"Greedy continuations:\n{generated}" if generated else "",
        f"## Shape\n\n```json\n{json.dumps(run.model.model_dump(), indent=2)}\n```\n",
    )
    return "\n\n".join(filter(None, parts))


def is_model_card(path: Path) -> bool:
    """Return whether the file is a model card of this module, whose title is its mark."""
    try:
        beginning = read_regular(path)[:1000].decode(errors="replace").splitlines()
    except OSError:
        return False
    return any(f"# {name}" in beginning for name in NAMES.values())


def _run_facts(run: RunConfig, checkpoint: Checkpoint, dtype: str, parameters: int) -> dict[str, str]:
    """Return figures of the config and the checkpoint."""
    stages = run_stages(run)
    # The stage of the last completed step: a checkpoint at a boundary belongs to the stage that ended there.
    stage = stage_at(stages, max(checkpoint.step - 1, 0))
    trainer, data_state = checkpoint.trainer, checkpoint.data_state
    shares = data_state.get("stage", {}).get("shares", {})
    domains = [f"{name} {100 * shares[name]:.3g}%" if name in shares else name for name in data_state["domains"]]
    facts = {
        "step": f"{checkpoint.step:,} of {run.train.steps:,}",
        "tokens seen": f"{checkpoint.trainer.get('tokens_seen') or tokens_seen(stages, checkpoint.step):,}",
        "parameters": f"{parameters:,}",
        "dtype of these files": dtype,
        "domains, shares of tokens": ", ".join(domains),
        "sequence length": f"{stage.sequence_length:,}",
        "samples per step": f"{stage.global_batch:,}",
        "DeepSpeed JSON": trainer.get("deepspeed", run.deepspeed),
        "largest learning rate": f"{run.optimizer.lr:g}, {run.schedule.kind}",
        "weight decay": f"{run.optimizer.weight_decay:g}",
    }
    if "lr_of_last_step" in trainer:
        facts["last learning rate"] = f"{trainer['lr_of_last_step']:.3g}"
    if "world_size" in trainer and "dtype" in trainer:
        facts["trained on"] = f"{trainer['world_size']} ranks in {trainer['dtype']}"
    return facts


def _speed(folder: RunFolder, records: list[dict[str, Any]]) -> dict[str, str]:
    """Return figures of metrics.jsonl and events.jsonl up to the checkpoint's step."""
    facts = {}
    if rates := [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]:
        facts["tokens/s (median)"] = f"{median(rates):,.0f}"
    if shares := [record["mfu"] for record in records if record.get("mfu")]:
        facts["MFU (median)"] = f"{100 * median(shares):.1f}%"
    if records:
        end = records[-1]["time_unix"]
        events = takewhile(lambda event: event["time_unix"] <= end, read_records(folder.events))
        used = goodput(events, records, end)
        if 0 < used.share <= 1:
            facts["goodput"] = used.line().removeprefix("goodput ")
    return facts


def _environment(folder: RunFolder) -> dict[str, str]:
    """Return optimizer, device and versions from environment.json."""
    if not folder.environment.is_file():
        return {}
    found: dict[str, Any] = load_json(read_regular(folder.environment))
    versions = {"python": found.get("python", ""), **found.get("packages", {})}
    facts = {
        "optimizer": found.get("optimizer", {}).get("kind", ""),
        "device": found.get("device", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    return {name: value for name, value in facts.items() if value}


def _loss_table(records: list[dict[str, Any]]) -> str:
    """Return the last training and validation losses, overall and per domain; empty if there are none."""
    last: dict[str, float] = {}
    for record in records:
        last |= {key: value for key, value in record.items() if isinstance(value, float)}
    prefixes = (LOSS_PREFIX, f"{VALIDATION}{LOSS_PREFIX}")
    names = {key.removeprefix(prefix) for prefix in prefixes for key in last if key.startswith(prefix)}
    rows = []
    for title, suffix in [("all", ""), *((name, f"_of_{name}") for name in sorted(names))]:
        keys = (f"loss{suffix}", f"{VALIDATION}loss{suffix}", f"{VALIDATION}perplexity{suffix}")
        if any(key in last for key in keys):
            rows.append((title, *(f"{last[key]:.4g}" if key in last else "" for key in keys)))
    return _table(("", "training", "held out", "held-out perplexity"), rows) if rows else ""


def _verification(verdict: Verdict, model_format: str) -> str:
    package = "without z2all_ds" if model_format == "llama" else "with z2all_ds"
    method = "layer by layer" if verdict.how == LAYERWISE else f"by `{verdict.how}`"
    loss = verdict.loss_difference
    trained = "" if loss is None else f" Their loss on fixed tokens is within {loss:.1e} of that measured in training."
    return (
        f"Loaded {method} in a fresh process {package}, these files give the logits of the training weights within "
        f"{verdict.max_relative_difference:.1e} (relative) on {verdict.tokens_compared:,} tokens.{trained}"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
