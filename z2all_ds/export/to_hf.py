"""Exports a checkpoint to a Hugging Face folder: safetensors, config, tokenizer and model card, verified by its logits
and by the loss that the training measured.

Weights are read, rounded and written some megabytes at a time, and verified layer by layer, so that a model may be many
times larger than memory.
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from z2all_ds.base.atomic_folder import atomic_folder
from z2all_ds.base.config import RunConfig, load_run_config
from z2all_ds.base.console import heartbeat, progress, say
from z2all_ds.base.errors import CheckpointError, ConfigError
from z2all_ds.base.machine import require_free_disk
from z2all_ds.base.paths import full_path
from z2all_ds.base.process_memory import peak_bytes
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.sizes import parse_size
from z2all_ds.checkpoint.layout import Checkpoint, find_latest, open_checkpoint
from z2all_ds.checkpoint.retention import held
from z2all_ds.checkpoint.settings import model_of
from z2all_ds.export.model_card import is_model_card, model_card
from z2all_ds.export.verify import (
    TrainedLoss,
    Verdict,
    compare_with_folder,
    fits_whole,
    real_texts,
    reference_logits,
)
from z2all_ds.ops.dtypes import TORCH_DTYPES
from z2all_ds.tokenizer.tokenization_z2all import Z2allTokenizer, load_tokenizer

if TYPE_CHECKING:
    from z2all_ds.model import Z2allConfig

FORMATS = ("llama", "z2all")
EXPORTED_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|model\.safetensors\.index)\.json"
    r"|chat_template\.jinja|tokenizer\.model|README\.md|model(-\d+-of-\d+)?\.safetensors"
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
)


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
    folder, checkpoint = pick_checkpoint(full_path(path))
    run = load_run_config(str(folder.config))
    out = full_path(out or folder.exports / checkpoint.path.name)
    require_replaceable(out)  # before hours of work
    with held(checkpoint.path), atomic_folder(out, require_replaceable) as temporary:
        parameters, verdict = _fill(temporary, run, folder, checkpoint, dtype, max_shard_bytes, model_format)
    return ExportReport(out, checkpoint.step, parameters, verdict, peak_bytes())


def require_replaceable(out: Path) -> None:
    """Refuse to replace anything but an export of ours, which its model card shows: a folder with other files in it,
    the model of somebody else, a link, a file."""
    if not os.path.lexists(out):
        return
    entries = sorted(out.iterdir()) if out.is_dir() and not out.is_symlink() else []
    foreign = [entry.name for entry in entries if not EXPORTED_FILES.fullmatch(entry.name) or not entry.is_file()]
    if foreign or not is_model_card(out / "README.md"):
        rule = f"has {foreign[0]}, which is not part of an export" if foreign else "exists and is not an export"
        raise ConfigError(f"--out {out}", rule, "Use a new folder.")


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
    from z2all_ds.export.shards import open_parts, plan_shards, write_shards

    torch_dtype, tokenizer = TORCH_DTYPES[dtype], load_tokenizer(run.data.tokenizer)
    config = checkpoint_config(run, checkpoint, tokenizer)
    reader, parts = open_parts(checkpoint.path, config)
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
            trained=TrainedLoss.of(checkpoint, config.vocab_size, dtype),
        )
    card = model_card(run, folder, checkpoint, dtype, model_format, parameters, verdict)
    (out / "README.md").write_text(card, encoding="utf-8")
    return parameters, verdict


def checkpoint_config(run: RunConfig, checkpoint: Checkpoint, tokenizer: Z2allTokenizer) -> "Z2allConfig":
    """Return the model config at the checkpoint's step."""
    from z2all_ds.model import Z2allConfig

    trained_with = checkpoint.data_state.get("tokenizer_fingerprint", tokenizer.fingerprint)
    if trained_with != tokenizer.fingerprint:
        raise CheckpointError(
            f"tokenizer {run.data.tokenizer}",
            f"is not the one that {checkpoint.name} was trained with",
            "Restore it, or set data.tokenizer in the run's run.yaml to the right folder.",
        )
    return Z2allConfig.from_section(model_of(run, checkpoint), **tokenizer.model_token_ids)


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
