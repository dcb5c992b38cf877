"""README.md of an exported folder: what the run was, how far it had come, what was proven, how to load it.

A figure that the run folder does not have is left out.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import takewhile
from statistics import median
from typing import Any

from z2all_ds.base.config import RunConfig
from z2all_ds.base.config.stages import run_stages, stage_at, tokens_seen
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.checkpoint.layout import Checkpoint
from z2all_ds.export.verify import IN_TURN, Verdict
from z2all_ds.track.fields import LOSS_PREFIX
from z2all_ds.track.goodput import goodput
from z2all_ds.track.writer import read_records

VALIDATION = "validation_"
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
    """The whole file."""
    # Steps are taken again after a rollback to a checkpoint; what came later is not of this model.
    records = list(takewhile(lambda record: record["step"] <= checkpoint.step, read_records(folder.metrics)))
    facts = {
        **run_facts(run, checkpoint, dtype, parameters),
        **figures(records),
        **_goodput(folder, records),
        **_surroundings(folder),
    }
    name = {"llama": "A Z2all model in Llama format", "z2all": "A Z2all model"}[model_format]
    losses = _loss_table(records)
    generated = "".join(f"\n- `{prompt!r}` → `{made!r}`" for prompt, made in verdict.generated.items())
    shape = json.dumps(run.model.model_dump(), indent=2)
    return "\n\n".join(
        part
        for part in (
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
            f"# {name}",
            f"```python\n{LOADING[model_format]}\n```",
            "## The run\n\n" + _table(("", ""), facts.items()),
            f"## Loss\n\n{losses}" if losses else "",
            f"## Proof\n\n{proof(verdict, model_format)}",
            f"Greedy continuations:\n{generated}" if generated else "",
            f"## Shape\n\n```json\n{shape}\n```\n",
        )
        if part
    )


def run_facts(run: RunConfig, checkpoint: Checkpoint, dtype: str, parameters: int) -> dict[str, str]:
    """What the config and the checkpoint say."""
    stages = run_stages(run)
    # of the last step done, not of the next: a checkpoint at a border was made by the stage that ended there
    stage = stage_at(stages, max(checkpoint.step - 1, 0))
    trainer, data_state = checkpoint.trainer, checkpoint.data_state
    shares = data_state.get("stage", {}).get("shares", {})
    domains = [f"{name} {100 * shares[name]:.3g}%" if name in shares else name for name in data_state["domains"]]
    facts = {
        "step": f"{checkpoint.step:,} of {run.train.steps:,}",
        "tokens seen": f"{tokens_seen(stages, checkpoint.step):,}",
        "parameters": f"{parameters:,}",
        "dtype of these files": dtype,
        "domains, shares of tokens": ", ".join(domains),
        "sequence length": f"{stage.sequence_length:,}",
        "samples a step": f"{stage.global_batch:,}",
        "DeepSpeed JSON": trainer.get("deepspeed", run.deepspeed),
        "largest learning rate": f"{run.optimizer.lr:g}, {run.schedule.kind}",
        "weight decay": f"{run.optimizer.weight_decay:g}",
    }
    if "lr_of_last_step" in trainer:
        facts["last learning rate"] = f"{trainer['lr_of_last_step']:.3g}"
    if "world_size" in trainer and "dtype" in trainer:
        facts["trained on"] = f"{trainer['world_size']} ranks in {trainer['dtype']}"
    return facts


def figures(records: list[dict[str, Any]]) -> dict[str, str]:
    """What metrics.jsonl says."""
    facts = {}
    rates = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    if rates:
        facts["tokens/s (median)"] = f"{median(rates):,.0f}"
    shares = [record["mfu"] for record in records if record.get("mfu")]
    if shares:
        facts["MFU (median)"] = f"{100 * median(shares):.1f}%"
    return facts


def proof(verdict: Verdict, model_format: str) -> str:
    """One sentence."""
    where = "without z2all_ds" if model_format == "llama" else "with z2all_ds"
    way = "layer by layer" if verdict.how == IN_TURN else f"by `{verdict.how}`"
    return (
        f"Loaded {way} in a fresh process {where}, these files give the logits of the training weights within "
        f"{verdict.max_relative_difference:.1e} (relative) on {verdict.tokens_compared:,} tokens of the corpus."
    )


def _loss_table(records: list[dict[str, Any]]) -> str:
    """The last loss in training and on held-out text, whole and per domain; empty without any."""
    last: dict[str, float] = {}
    for record in records:
        last |= {key: value for key, value in record.items() if isinstance(value, float)}
    names = [key.removeprefix(LOSS_PREFIX) for key in last if key.startswith(LOSS_PREFIX)]
    held_out = f"{VALIDATION}{LOSS_PREFIX}"
    names += [key.removeprefix(held_out) for key in last if key.startswith(held_out)]
    rows = []
    for title, suffix in [("all", ""), *((name, f"_of_{name}") for name in sorted(set(names)))]:
        keys = (f"loss{suffix}", f"{VALIDATION}loss{suffix}", f"{VALIDATION}perplexity{suffix}")
        if any(key in last for key in keys):
            rows.append((title, *(f"{last[key]:.4g}" if key in last else "" for key in keys)))
    return _table(("", "training", "held out", "held-out perplexity"), rows) if rows else ""


def _goodput(folder: RunFolder, records: list[dict[str, Any]]) -> dict[str, str]:
    """Up to the checkpoint's last step."""
    if not records:
        return {}
    end = records[-1]["time_unix"]
    events = takewhile(lambda event: event["time_unix"] <= end, read_records(folder.events))
    used = goodput(events, records, end)
    return {"goodput": used.line().removeprefix("goodput ")} if 0 < used.share <= 1 else {}


def _surroundings(folder: RunFolder) -> dict[str, str]:
    """What environment.json says: optimizer, device, versions."""
    if not folder.environment.is_file():
        return {}
    found: dict[str, Any] = json.loads(folder.environment.read_text(encoding="utf-8"))
    versions: Mapping[str, str] = {"python": found.get("python", ""), **found.get("packages", {})}
    facts = {
        "optimizer": found.get("optimizer", {}).get("kind", ""),
        "device": found.get("device", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    return {name: value for name, value in facts.items() if value}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
