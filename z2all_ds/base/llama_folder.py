"""Reads a Hugging Face Llama folder without torch: its config, tensor headers and tokens.

Everything that a run with `train.init_from` needs is checked here, including the shape of every tensor, so that
problems are found before any rank starts.
"""

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.paths import expanded
from z2all_ds.base.rope_scaling import check_rope_scaling, with_rope_type
from z2all_ds.base.storage.open_files import open_regular, read_regular
from z2all_ds.base.vocabulary_rows import tokens_in

MODEL_TYPES = ("llama", "z2all")
"""`z2all`: a folder of this package's own model class, which uses Llama's tensor names."""
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")
LONGEST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


@dataclass(frozen=True)
class TensorPlace:
    """File, shape and dtype of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class LlamaFolder:
    """A Llama folder; every error about it is one line that starts with `setting`."""

    def __init__(self, path: str | Path, setting: str = "train.init_from") -> None:
        self.path = expanded(path)
        self._setting = f"{setting}={path}"
        if not self.path.is_dir():
            raise self._wrong("no such folder", "Use a local Hugging Face folder.")
        self.config = self._read_json("config.json")
        kind = self.config.get("model_type")
        if kind not in MODEL_TYPES:
            raise self._wrong(f"its model_type is {kind}", "Only Llama folders are supported.")
        for name, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("quantization_config", None)):
            if self.config.get(name, wanted) != wanted:
                raise self._wrong(f"its {name} is {self.config[name]}, which is not supported", "Use another model.")
        heads, hidden_size = self._size("num_attention_heads"), self._size("hidden_size")
        head_dim = self.config.get("head_dim") or hidden_size // heads
        if head_dim != hidden_size / heads:
            rule = f"its head_dim is {head_dim}, not hidden_size / num_attention_heads = {hidden_size} / {heads}"
            raise self._wrong(rule, "Use another model.")

    def _wrong(self, rule: str, fix: str) -> ConfigError:
        return ConfigError(self._setting, rule, fix)

    # Config

    @property
    def vocab_size(self) -> int:
        return self._size("vocab_size")

    @cached_property
    def model_fields(self) -> dict[str, Any]:
        """The `model` section of a run config for this folder; defaults are those of Llama's config class."""
        with explain_content(ConfigError, self._setting, "its config.json is not valid", "Use a complete copy."):
            return self._model_fields()

    def _model_fields(self) -> dict[str, Any]:
        config = self.config
        rope = dict(config.get("rope_parameters") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        scaling = with_rope_type({**rope, **(config.get("rope_scaling") or {})})
        theta = scaling.pop("rope_theta", theta)
        scaling = {name: value for name, value in scaling.items() if value is not None}
        is_scaled = scaling.get("rope_type", "default") != "default"
        heads = self._size("num_attention_heads")
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self._size("hidden_size"),
            "intermediate_size": self._size("intermediate_size"),
            "num_hidden_layers": self._size("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "max_position_embeddings": config.get("max_position_embeddings") or 2048,
            "rope_theta": float(theta),
            "rope_scaling": check_rope_scaling(scaling, f"{self._setting}: rope_scaling") if is_scaled else None,
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "initializer_range": config.get("initializer_range", 0.02),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "attention_bias": bool(config.get("attention_bias", False)),
        }

    def require_same_model(self, section: ModelSection) -> None:
        """Check every setting that gives the weights their meaning; the vocabulary may differ."""
        free = {"vocab_size", "initializer_range"}
        if section.rope_scaling is None or section.rope_scaling["rope_type"] != "dynamic":
            free.add("max_position_embeddings")  # dynamic scaling starts at this length
        for name, theirs in self.model_fields.items():
            ours = getattr(section, name)
            if name not in free and ours != theirs:
                raise ConfigError(
                    f"model.{name}={json.dumps(ours)}",
                    f"{self.path.name}/config.json of train.init_from has {json.dumps(theirs)}",
                    f"Set model.{name}={json.dumps(theirs)}.",
                )

    def _size(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(f"its config.json has {name}={value!r}", "It must be a whole number above 0.")
        return value

    # Tensors

    @cached_property
    def tensors(self) -> dict[str, TensorPlace]:
        """Tensors by Llama's names, from the headers of the files."""
        if (self.path / INDEX).is_file():
            names = sorted(set(self._read_json(INDEX).get("weight_map", {}).values()))
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing or not names:
                what = f"{len(missing)} of {len(names)} files of its index are missing ({', '.join(missing[:2])})"
                raise self._wrong(what if names else f"its {INDEX} names no files", "Use a complete copy.")
        elif (self.path / ONE_FILE).is_file():
            names = [ONE_FILE]
        else:
            raise self._wrong(f"it has no {ONE_FILE}", "Save it with save_pretrained(safe_serialization=True).")
        return {name: place for file in names for name, place in self._header(self.path / file).items()}

    def require_tensors(self) -> None:
        """Check that every weight of the model exists and has the right shape."""
        for name, shape in self._expected():
            place = self.tensors.get(name)
            if place is None or place.shape != shape or place.dtype not in FLOATS:
                found = "no such tensor" if place is None else f"{place.dtype} of {list(place.shape)}"
                raise self._wrong(f"{name} should be {list(shape)} and is {found}", "Use a complete Llama folder.")

    def _expected(self) -> list[tuple[str, tuple[int, ...]]]:
        fields = self.model_fields
        width, inner = fields["hidden_size"], fields["intermediate_size"]
        kv_width = width // fields["num_attention_heads"] * fields["num_key_value_heads"]
        attention = {"q_proj": (width, width), "k_proj": (kv_width, width), "v_proj": (kv_width, width)}
        attention["o_proj"] = (width, width)
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        expected: list[tuple[str, tuple[int, ...]]] = [(EMBEDDING, (self.vocab_size, width))]
        for number in range(fields["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            expected += [(f"{layer}.{norm}_layernorm.weight", (width,)) for norm in ("input", "post_attention")]
            expected += [(f"{layer}.mlp.{name}.weight", shape) for name, shape in mlp.items()]
            for name, shape in attention.items():
                expected.append((f"{layer}.self_attn.{name}.weight", shape))
                if fields["attention_bias"]:
                    expected.append((f"{layer}.self_attn.{name}.bias", shape[:1]))
        expected.append(("model.norm.weight", (width,)))
        return expected if fields["tie_word_embeddings"] else [*expected, (HEAD, (self.vocab_size, width))]

    def _header(self, file: Path) -> dict[str, TensorPlace]:
        """Read names, shapes and dtypes, and check that the file has all of its data."""
        try:
            with os.fdopen(open_regular(file), "rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                content = load_json(opened.read(length)) if length <= LONGEST_HEADER_BYTES else {}
            found = {name: entry for name, entry in content.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in found.values()), default=math.inf)
            if file.stat().st_size != 8 + length + end:
                raise ValueError("its size does not match its header")
            return {name: TensorPlace(file, tuple(e["shape"]), e["dtype"]) for name, e in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._wrong(f"{file.name} is no valid safetensors file ({error})", "Use a complete copy.") from None

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            content = load_json(read_regular(self.path / name))
        except FileNotFoundError:
            raise self._wrong(f"it has no {name}", "Use a local Hugging Face folder.") from None
        except (OSError, ValueError) as error:
            raise self._wrong(f"its {name} cannot be read ({error})", "Use a complete copy.") from None
        if not isinstance(content, dict):
            raise self._wrong(f"its {name} is not a JSON object", "Use a complete copy.")
        return content

    # Tokens

    @cached_property
    def tokens(self) -> dict[str, int] | None:
        """Token text -> id; None without a tokenizer.json."""
        if not (self.path / "tokenizer.json").is_file():
            return None
        content = self._read_json("tokenizer.json")
        with explain_content(ConfigError, self._setting, "its tokenizer.json is not valid", "Use a complete copy."):
            return tokens_in(content)
