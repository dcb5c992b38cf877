"""Loads a model to evaluate: a Hugging Face folder, a run folder, or one checkpoint of a run.

A checkpoint is loaded into transformers' Llama directly from the master weights: nothing is written to disk, and there
is one interface (`model(input_ids, attention_mask).logits`, `model.generate`) for all of them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from z2all_ds.base.config import load_run_config
from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.checkpoint.layout import is_step_name
from z2all_ds.checkpoint.retention import held
from z2all_ds.ops.dtypes import TORCH_DTYPES

AUTO = "auto"
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names under which configs store the longest supported sequence."""
ID_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode and its tokenizer, device and label."""

    model: Any
    tokenizer: Any
    """As returned by AutoTokenizer."""
    device: torch.device
    label: str
    """Name for display: "runs/first step 200", or the folder's path."""
    step: int | None
    """None unless it is a checkpoint."""

    @property
    def known_max_tokens(self) -> int | None:
        """The longest sequence the model supports; None if its config does not state it (Bloom's may not)."""
        config = self.model.config
        found = (getattr(part, name, None) for part in (config, config.get_text_config()) for name in LENGTH_NAMES)
        return next((longest for longest in found if isinstance(longest, int) and longest > 0), None)

    @property
    def max_tokens(self) -> int:
        """The longest sequence the model supports; raises if unknown."""
        longest = self.known_max_tokens
        if longest is None:
            rule = "its config.json does not state how many tokens it supports"
            raise ConfigError(f"model {self.label}", rule, f"Add {LENGTH_NAMES[0]} to it.")
        return longest

    def require_token(self, largest: int) -> None:
        """Raise if the model has no row for this token: the tokenizer belongs to another model."""
        rows = self.model.get_input_embeddings().num_embeddings
        if largest >= rows:
            raise DataError(f"token {largest}", f"{self.label} has only {rows}", "Use the tokenizer of this model.")


def load_model(
    path: str | Path, dtype: str = AUTO, device: torch.device | None = None, quiet: bool = False
) -> LoadedModel:
    """Load a model onto `device` (default: a GPU if available). `dtype`: auto, fp32, bf16 or fp16."""
    path = Path(path).expanduser()
    device = device or best_device()
    torch_dtype = _dtype(dtype, device)
    if (path / "config.json").is_file():
        return _load_folder(path, torch_dtype, device, quiet)
    if (path / "checkpoints").is_dir() or (path / "run.yaml").is_file() or is_step_name(path.resolve().name):
        return _load_checkpoint(path, torch_dtype, device, quiet)
    raise DataError(
        f"model {path}",
        "not a Hugging Face folder (no config.json), run folder or checkpoint" if path.is_dir() else "no such folder",
        "Use an export, a run folder, or one of its checkpoints/step_N.",
    )


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == AUTO:
        # On a CPU bf16 products are about 100 times slower than fp32 ones.
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype {name}", "no such dtype", f"Known: {AUTO}, {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[name]


def _load_folder(folder: Path, dtype: torch.dtype, device: torch.device, quiet: bool) -> LoadedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import z2all_ds.model  # noqa: F401 - for exports in our own format: registers the model

    try:
        with _heartbeat(str(folder), quiet), _without_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused by name below
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(f"model {folder}", f"does not load ({first_line})", "Export it again.") from error
    _require_weights(folder, report)
    model.generation_config = _bare_generation_config(model.generation_config)
    return LoadedModel(model.to(device).eval(), tokenizer, device, str(folder), None)


def _require_weights(folder: Path, report: dict[str, Any]) -> None:
    """Refuse missing or mismatched weights, which transformers fills with random numbers. Tied weights are fine."""
    wrong = dict.fromkeys(report["missing_keys"], "is missing")
    wrong |= {key: f"has the shape {list(is_)}, not {list(wanted)}" for key, is_, wanted in report["mismatched_keys"]}
    if wrong:
        first = min(wrong)
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise DataError(f"model {folder}", f"weight {first} {wrong[first]}{others}", "Export it again.")


def _bare_generation_config(found: Any) -> Any:
    """Return a config with the token ids only: transformers would apply anything else in the folder's config (beams,
    penalties, stop strings) by default, and greedy would not be greedy."""
    from transformers import GenerationConfig

    return GenerationConfig(**{name: getattr(found, name) for name in ID_NAMES})


def _heartbeat(what: str, quiet: bool) -> AbstractContextManager[None]:
    return nullcontext() if quiet else heartbeat(f"loading {what}")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Disables transformers' progress bars, which would overwrite this package's."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


def _load_checkpoint(path: Path, dtype: torch.dtype, device: torch.device, quiet: bool) -> LoadedModel:
    from transformers import AutoTokenizer

    from z2all_ds.export.to_hf import checkpoint_config, pick_checkpoint
    from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

    shown = path.parent.parent if is_step_name(path.resolve().name) else path
    folder, checkpoint = pick_checkpoint(path.resolve())
    with held(checkpoint.path):
        run = load_run_config(str(folder.config))
        config = checkpoint_config(run, checkpoint, load_tokenizer(run.data.tokenizer))
        with _heartbeat(f"{shown} step {checkpoint.step}", quiet):
            model = _filled_llama(config, checkpoint.path, dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(run.data.tokenizer)
    return LoadedModel(model, tokenizer, device, f"{shown} step {checkpoint.step}", checkpoint.step)


def _filled_llama(config: Any, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Fill a Llama, some megabytes at a time: there is never a second copy of the weights."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from z2all_ds.export.shards import exported_parts
    from z2all_ds.export.weights import WeightReader

    reader, llama = WeightReader(checkpoint), config.to_llama()
    with torch.device("meta"):
        model = LlamaForCausalLM(llama)
    model = model.to(dtype).to_empty(device=device)
    model.tie_weights()
    # The frequencies are not parameters: to_empty lost them, and they stay in fp32 for any dtype.
    model.model.rotary_emb = LlamaRotaryEmbedding(llama).to(device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for part in exported_parts(reader.shapes, config):
            reader.fill(parameters.pop(part.name), part.parameter, part.start)
    assert not parameters, sorted(parameters)
    model.generation_config = _bare_generation_config(config)
    return model.eval()
