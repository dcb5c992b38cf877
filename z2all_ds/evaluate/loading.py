"""Loads a model to evaluate: a Hugging Face folder, a run folder, or one checkpoint of a run.

A checkpoint is loaded into transformers' Llama directly from the master weights: nothing is written to disk, and there
is one interface (`model(input_ids, attention_mask).logits`, `model.generate`) for all of them.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from z2all_ds.base.accounting import count_parameters
from z2all_ds.base.config import load_run_config
from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.console import heartbeat, say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.llama_folder import LlamaFolder
from z2all_ds.base.paths import expanded, full_path
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.checkpoint.layout import is_step_name
from z2all_ds.checkpoint.retention import held
from z2all_ds.ops.dtypes import TORCH_DTYPES

AUTO = "auto"
_FIX = "Use a complete copy."
LARGEST_ID = 2**31
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
    path = expanded(path)
    device = device or best_device()
    torch_dtype = _dtype(dtype, device)
    load = _load_folder if is_hf_folder(path) else _load_checkpoint
    return load(path, torch_dtype, device, quiet)


def is_hf_folder(path: str | Path) -> bool:
    """Return whether a model is a Hugging Face folder, and not a run folder or a checkpoint; raise if it is none."""
    path = expanded(path)
    if (path / "config.json").is_file():
        return True
    if (path / "checkpoints").is_dir() or (path / "run.yaml").is_file() or is_step_name(full_path(path).name):
        return False
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
    from transformers import AutoModelForCausalLM

    import z2all_ds.model  # noqa: F401 - for exports in our own format: registers the model

    _require_plausible_size(folder)
    with explain_content(DataError, f"model {folder}", "does not load", _FIX):
        with _heartbeat(str(folder), quiet), _without_output():
            tokenizer = load_hf_tokenizer(folder, f"model {folder}")
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and refused by name below
                trust_remote_code=False,
            )
        _require_layers(model.config.get_text_config())
        _require_weights(folder, report)
        if not quiet:
            _name_unused_weights(folder, report["unexpected_keys"])
        model.generation_config = _bare_generation_config(model.generation_config)
    return LoadedModel(model.to(device).eval(), tokenizer, device, str(folder), None)


def load_hf_tokenizer(folder: str | Path, what: str) -> Any:
    """Return the tokenizer of a Hugging Face folder. Code in the folder is never run, and nobody is asked about it."""
    from transformers import AutoTokenizer

    from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE, check_growth, check_merges

    with explain_content(DataError, what, "does not load", _FIX), _without_output():
        if (file := Path(folder) / TOKENIZER_FILE).is_file():
            data = read_regular(file)
            check_merges(data)
            check_growth(data)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer("")  # some errors come with the first text
    return tokenizer


def _require_plausible_size(folder: Path) -> None:
    """Refuse a Llama whose config describes a much larger model than its files hold: transformers would build it, in
    any amount of memory, before it notices. Other problems are left to transformers."""
    try:
        found = LlamaFolder(folder)
        layers = found.model_fields["num_hidden_layers"]
        if layers > len(found.tensors):
            rule = f"config.json describes {layers:,} layers, and the files hold {len(found.tensors):,} weights"
            raise DataError(f"model {folder}", rule, _FIX)
        described = count_parameters(ModelSection(**found.model_fields).shape).total
        held = sum(math.prod(place.shape) for place in found.tensors.values())
    except (ConfigError, ValueError, TypeError, LookupError, AttributeError):
        return
    if described > 2 * held:
        rule = f"config.json describes {described:,} parameters, and the files hold {held:,}"
        raise DataError(f"model {folder}", rule, _FIX)


def _require_weights(folder: Path, report: dict[str, Any]) -> None:
    """Refuse missing or mismatched weights, which transformers fills with random numbers. Tied weights are fine."""
    wrong = dict.fromkeys(report["missing_keys"], "is missing")
    wrong |= {key: f"has the shape {list(is_)}, not {list(wanted)}" for key, is_, wanted in report["mismatched_keys"]}
    if wrong:
        first = min(wrong)
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise DataError(f"model {folder}", f"weight {first} {wrong[first]}{others}", _FIX)


def _require_layers(config: Any) -> None:
    """Refuse a model that transformers has built without layers: generating text from it may fail."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ValueError(f"config.json describes {layers} layers")


def _name_unused_weights(folder: Path, names: Collection[str]) -> None:
    if names:
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        say(f"warning: model {folder}: its config.json does not use the weight {min(names)}{others}")


def _bare_generation_config(found: Any) -> Any:
    """Return a config with the token ids only: transformers would apply anything else in the folder's config (beams,
    penalties, stop strings) by default, and greedy would not be greedy."""
    from transformers import GenerationConfig

    values = {name: getattr(found, name) for name in ID_NAMES}
    for name, value in values.items():
        ids = value if isinstance(value, list) else [value]
        if not all(one is None or (type(one) is int and abs(one) < LARGEST_ID) for one in ids):
            raise ValueError(f"{name}={value!r} is not an id of a token")
    return GenerationConfig(**values)


def _heartbeat(what: str, quiet: bool) -> AbstractContextManager[None]:
    return nullcontext() if quiet else heartbeat(f"loading {what}")


@contextmanager
def _without_output() -> Iterator[None]:
    """Disable transformers' progress bars, which would overwrite this package's, and its warnings, which quote names
    from the files that may contain control characters."""
    from transformers.utils import logging

    verbosity, were_on = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(max(verbosity, logging.ERROR))
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if were_on:
            logging.enable_progress_bar()


def _load_checkpoint(path: Path, dtype: torch.dtype, device: torch.device, quiet: bool) -> LoadedModel:
    from z2all_ds.export.to_hf import checkpoint_config, pick_checkpoint
    from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer

    shown = path.parent.parent if is_step_name(full_path(path).name) else path
    folder, checkpoint = pick_checkpoint(full_path(path))
    with held(checkpoint.path):
        run = load_run_config(str(folder.config))
        config = checkpoint_config(run, checkpoint, load_tokenizer(run.data.tokenizer))
        with _heartbeat(f"{shown} step {checkpoint.step}", quiet):
            model = _filled_llama(config, checkpoint.path, dtype, device)
    tokenizer = load_hf_tokenizer(run.data.tokenizer, f"tokenizer {run.data.tokenizer}")
    return LoadedModel(model, tokenizer, device, f"{shown} step {checkpoint.step}", checkpoint.step)


def _filled_llama(config: Any, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Fill a Llama, some megabytes at a time: there is never a second copy of the weights."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from z2all_ds.export.shards import open_parts

    (reader, parts), llama = open_parts(checkpoint, config), config.to_llama()
    with torch.device("meta"):
        model = LlamaForCausalLM(llama)
    model = model.to(dtype).to_empty(device=device)
    model.tie_weights()
    # The frequencies are not parameters: to_empty lost them, and they stay in fp32 for any dtype.
    model.model.rotary_emb = LlamaRotaryEmbedding(llama).to(device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for part in parts:
            reader.fill(parameters.pop(part.name), part.parameter, part.start)
    assert not parameters, sorted(parameters)
    model.generation_config = _bare_generation_config(config)
    return model.eval()
