"""Exports a checkpoint to a Hugging Face folder: safetensors, config, tokenizer and model card, verified by its logits.

Weights are read, rounded and written some megabytes at a time, and verified layer by layer, so that a model may be many
times larger than memory.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.config.stages import run_stages, stage_at
from z2all_ds.base.console import heartbeat, progress, say
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.machine import require_free_disk
from z2all_ds.base.process_memory import peak_bytes
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.sizes import parse_size
from z2all_ds.checkpoint.layout import Checkpoint, find_latest, open_checkpoint
from z2all_ds.checkpoint.retention import held
from z2all_ds.export.atomic_folder import atomic_folder
from z2all_ds.export.model_card import model_card
from z2all_ds.export.verify import Verdict, compare_with_folder, fits_whole, real_texts, reference_logits
from z2all_ds.export.weights import WeightReader
from z2all_ds.ops.dtypes import TORCH_DTYPES
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer

if TYPE_CHECKING:
    from z2all_ds.model import Z2allConfig

FORMATS = ("llama", "z2all")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class ExportReport:
    """The exported folder and the result of its verification."""

    folder: Path
    step: int
    parameters: int
    verdict: Verdict
    peak_memory_bytes: int
    """Peak resident memory of this process or the one that loaded the folder, whichever is larger."""


def pick_checkpoint(path: Path) -> tuple[RunFolder, Checkpoint]:
    """Open the newest healthy checkpoint of a run folder, or the checkpoint in the given folder."""
    if (path / "checkpoints").is_dir():
        checkpoint, skipped = find_latest(path / "checkpoints")
        for line in skipped:
            say(line)
        if checkpoint is None:
            raise CheckpointError(f"run folder {path}", "has no complete checkpoint", "Train it for longer first.")
        return RunFolder(path), checkpoint
    return RunFolder(path.parent.parent), open_checkpoint(path)


def export_checkpoint(
    path: Path,
    out: Path | None = None,
    dtype: str = "fp32",
    max_shard_size: str = "4GB",
    model_format: str = "llama",
) -> ExportReport:
    """Write the folder (default: exports/step_NNNNNNNN in the run folder). Replace an earlier export."""
    for what, value, known in (("dtype", dtype, TORCH_DTYPES), ("format", model_format, FORMATS)):
        if value not in known:
            raise ConfigError(f"{what} {value}", f"no such {what}", f"Known: {', '.join(known)}.")
    max_shard_bytes = parse_size(max_shard_size)
    folder, checkpoint = pick_checkpoint(path.expanduser().resolve())
    run = load_run_config(str(folder.config))
    out = (out or folder.exports / checkpoint.path.name).expanduser().resolve()
    if out.exists() and not (out / "config.json").is_file():
        raise ConfigError(f"--out {out}", "exists and is not an export", "Use a new folder.")
    with held(checkpoint.path), atomic_folder(out) as temporary:
        parameters, verdict = _fill(temporary, run, folder, checkpoint, dtype, max_shard_bytes, model_format)
    return ExportReport(out, checkpoint.step, parameters, verdict, peak_bytes())


def _fill(
    out: Path,
    run: RunConfig,
    folder: RunFolder,
    checkpoint: Checkpoint,
    dtype: str,
    max_shard_bytes: int,
    model_format: str,
) -> tuple[int, Verdict]:
    """Write all files and verify them. Return the number of parameters and the verdict."""
    from z2all_ds.export.shards import exported_parts, plan_shards, write_shards

    torch_dtype, tokenizer = TORCH_DTYPES[dtype], load_tokenizer(run.data.tokenizer)
    config, reader = checkpoint_config(run, checkpoint, tokenizer), WeightReader(checkpoint.path)
    parts = exported_parts(reader.shapes, config)
    parameters = sum(part.num_values for part in parts)
    size_bytes = parameters * torch_dtype.itemsize
    require_free_disk(out, size_bytes, "the export")
    with progress(f"writing the weights of {checkpoint.path.name}", size_bytes, "bytes") as advance:
        write_shards(out, plan_shards(parts, torch_dtype, max_shard_bytes), reader, torch_dtype, advance)
    _write_settings(out, config, Path(run.data.tokenizer), tokenizer, dtype, model_format)
    with heartbeat("comparing logits in a separate process"):
        verdict = compare_with_folder(
            reference_logits(reader, config, torch_dtype),
            tokenizer,
            out,
            real_texts(run.data.corpus, tokenizer),
            max_tokens=config.max_position_embeddings,
            whole=fits_whole(parameters),
            model_format=model_format,
        )
    card = model_card(run, folder, checkpoint, dtype, model_format, parameters, verdict)
    (out / "README.md").write_text(card, encoding="utf-8")
    return parameters, verdict


def checkpoint_config(run: RunConfig, checkpoint: Checkpoint, tokenizer: Z2allTokenizer) -> "Z2allConfig":
    """Return the model config at the checkpoint's step."""
    from z2all_ds.model import Z2allConfig

    # The stage of the last completed step: a checkpoint at a boundary belongs to the stage that ended there.
    stage = stage_at(run_stages(run), max(checkpoint.step - 1, 0))
    shape = run.model.model_copy(update={"rope_theta": stage.rope_theta})
    return Z2allConfig.from_section(shape, **tokenizer.model_token_ids)


def _write_settings(
    out: Path, config: "Z2allConfig", tokenizer_dir: Path, tokenizer: Z2allTokenizer, dtype: str, model_format: str
) -> None:
    """Write config, generation config and tokenizer files."""
    from transformers import GenerationConfig

    written = config.to_llama() if model_format == "llama" else type(config)(**config.to_dict())
    written.dtype = TORCH_DTYPES[dtype]
    if model_format == "z2all":
        written.architectures = ["Z2allForCausalLM"]
    written.save_pretrained(out)
    GenerationConfig(**tokenizer.model_token_ids).save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copy2(tokenizer_dir / name, out / name)
    for file in out.iterdir():
        file.chmod(0o644)  # some writers make their files private
