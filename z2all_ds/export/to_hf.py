"""Checkpoint -> Hugging Face folder (Llama format, safetensors, tokenizer), gated by the comparison of logits."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from z2all_ds.checkpoint.layout import Checkpoint, find_latest, open_checkpoint
from z2all_ds.checkpoint.state_files import StateReader
from z2all_ds.config import RunConfig, load_run_config
from z2all_ds.console import heartbeat, say
from z2all_ds.errors import CheckpointError, ConfigError
from z2all_ds.export.verify import Verdict, compare_with_folder, real_texts
from z2all_ds.ops.dtypes import TORCH_DTYPES
from z2all_ds.run_folder import RunFolder
from z2all_ds.run_stages import run_stages, stage_at, tokens_seen
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class ExportReport:
    """Where the folder is and what the comparison said."""

    folder: Path
    step: int
    parameters: int
    verdict: Verdict


def pick_checkpoint(path: Path) -> tuple[RunFolder, Checkpoint]:
    """From a run folder (its newest healthy checkpoint) or from one checkpoint's own folder."""
    if (path / "checkpoints").is_dir():
        checkpoint, skipped = find_latest(path / "checkpoints")
        for line in skipped:
            say(line)
        if checkpoint is None:
            raise CheckpointError(f"run folder {path}", "has no complete checkpoint", "Train it for longer first.")
        return RunFolder(path), checkpoint
    return RunFolder(path.parent.parent), open_checkpoint(path)


def export_checkpoint(
    path: Path, out: Path | None = None, dtype: str = "fp32", max_shard_size: str = "4GB"
) -> ExportReport:
    """Writes the folder (default: exports/step_NNNNNNNN in the run folder). Replaces an export of the same place."""
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    from z2all_ds.model import Z2allConfig, Z2allForCausalLM
    from z2all_ds.model.stock_keys import to_stock

    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype {dtype}", "no such dtype", f"Known: {', '.join(TORCH_DTYPES)}.")
    folder, checkpoint = pick_checkpoint(path.expanduser().resolve())
    run = load_run_config(str(folder.config))
    out = (out or folder.exports / checkpoint.path.name).expanduser().resolve()
    if out.exists() and not (out / "config.json").is_file():
        raise ConfigError(f"--out {out}", "exists and is not an export", "Give a new folder.")
    tokenizer = load_tokenizer(run.data.tokenizer)
    # of the last step done, not of the next: a checkpoint at a border was made by the stage that ended there
    stage = stage_at(run_stages(run), max(checkpoint.step - 1, 0))
    shape = run.model.model_copy(update={"rope_theta": stage.rope_theta})
    config = Z2allConfig.from_section(shape, **tokenizer.model_token_ids)
    with heartbeat(f"reading the weights of {checkpoint.path.name}"):
        weights = {name: t.to(TORCH_DTYPES[dtype]).contiguous() for name, t in read_weights(checkpoint).items()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = Z2allForCausalLM(config).eval()
    model.load_state_dict(weights)  # into fp32: the reference computes in fp32 with the exported values

    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        stock = {name: tensor.clone() for name, tensor in to_stock(weights, config).items()}
        if config.tie_word_embeddings:
            stock.pop("lm_head.weight")
        save_torch_state_dict(stock, temporary, max_shard_size=max_shard_size, metadata={"format": "pt"})
        llama = config.to_llama()
        llama.dtype = TORCH_DTYPES[dtype]
        llama.save_pretrained(temporary)
        GenerationConfig(**tokenizer.model_token_ids).save_pretrained(temporary)
        for name in TOKENIZER_FILES:
            if (Path(run.data.tokenizer) / name).is_file():
                shutil.copy2(Path(run.data.tokenizer) / name, temporary / name)
        for file in temporary.iterdir():
            file.chmod(0o644)  # some writers make their files private
        (temporary / "README.md").write_text(model_card(run, checkpoint, dtype), encoding="utf-8")
        with heartbeat("comparing logits in a process without this package"):
            verdict = compare_with_folder(model, tokenizer, temporary, real_texts(run.data.corpus, tokenizer))
        if out.exists():
            shutil.rmtree(out)
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ExportReport(out, checkpoint.step, sum(t.numel() for t in stock.values()), verdict)


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The whole master weights under our own names."""
    reader = StateReader(checkpoint.path)
    return {name: reader.read_whole(name) for name in reader.shapes}


def model_card(run: RunConfig, checkpoint: Checkpoint, dtype: str) -> str:
    """README.md of the exported folder."""
    stages = run_stages(run)
    facts: dict[str, Any] = {
        "step": f"{checkpoint.step} of {run.train.steps}",
        "tokens seen": f"{tokens_seen(stages, checkpoint.step):,}",
        "sequence length": stage_at(stages, max(checkpoint.step - 1, 0)).sequence_length,
        "dtype": dtype,
        "domains": ", ".join(checkpoint.data_state["domains"]),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    shape = json.dumps(run.model.model_dump(), indent=2)
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        "# A Z2all model in Llama format\n\nLoads with `AutoModelForCausalLM` and `AutoTokenizer`; no remote code.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n```json\n{shape}\n```\n"
    )
