"""Z2all's Hugging Face config: Llama's fields under its own model type, with conversion from and to other configs.

The original Z2all project called the sizes `hidden_dim, n_layers, n_heads, n_kv_heads, max_seq_len`. Both spellings can
be passed, read and set; files use Llama's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import LlamaConfig

from z2all_ds.base.config.sections import ModelSection
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.rope_scaling import REQUIRED_FIELDS, check_rope_fields, with_rope_type

ORIGINAL_NAMES = {
    "hidden_dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
}
"""Original Z2all name -> Llama's name."""
ORIGIN_DEFAULTS: dict[str, Any] = {
    "vocab_size": 64000,
    "hidden_dim": 4096,
    "multiple_of": 256,
    "rms_norm_eps": 1e-5,
    "residual_in_fp32": True,
}
"""Defaults of the original Z2all config that differ from Llama's."""
ORIGIN_ONLY = (
    "auto_map",
    "use_flash",
    "use_fused_rope",
    "use_fused_cross_entropy",
    "use_fused_dropout_add_norm",
    "use_fused_swiglu",
)
"""Kernel and file settings of the original config; here the run config's `ops` section selects kernels."""
SAME_NAMES = (
    "vocab_size",
    "intermediate_size",
    "initializer_range",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "attention_bias",
    "attention_dropout",
    "dropout1",
    "dropout2",
    "residual_in_fp32",
)
"""Fields with the same name in both."""


class Z2allConfig(LlamaConfig):
    """A Llama config with model_type z2all. Its additional fields affect training or rounding, not the architecture."""

    model_type = "z2all"
    attribute_map: ClassVar[dict[str, str]] = ORIGINAL_NAMES

    dropout1: float = 0.0
    """Dropout of the attention output, before the residual sum; in training only."""
    dropout2: float = 0.0
    """Dropout of the feed-forward output, likewise."""
    residual_in_fp32: bool = False
    """Keep the residual stream in fp32 when the layers compute in 16 bits."""

    def __init__(self, **given: Any) -> None:
        fields = _under_llama_names(given)
        # A Llama folder's fields include its model type; if kept, transformers would treat this config as Llama.
        fields.pop("model_type", None)
        check_fields(fields)
        for name, default in OWN_FIELDS.items():
            setattr(self, name, fields.pop(name, default))
        super().__init__(**fields)

    @property
    def rope_theta(self) -> float:
        """The name used by transformers 4; stored in `rope_parameters`."""
        theta: float | None = (self.rope_parameters or {}).get("rope_theta")
        if theta is None:
            raise AttributeError("rope_theta")  # transformers reads it before it is set
        return theta

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        self.rope_parameters["rope_theta"] = value

    @classmethod
    def get_config_dict(cls, *where: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of a folder. Llama folders are accepted without transformers' model type warning."""
        fields, unused = super().get_config_dict(*where, **kwargs)
        if fields.get("model_type") == LlamaConfig.model_type:
            fields["model_type"] = cls.model_type
        return fields, unused

    @classmethod
    def from_section(cls, section: ModelSection, **token_ids: int | None) -> "Z2allConfig":
        """Create it from the run config's model section; `token_ids` are bos/eos/pad_token_id of the tokenizer."""
        fields: dict[str, Any] = section.model_dump()
        rope = {"rope_theta": fields.pop("rope_theta"), **(fields.pop("rope_scaling") or {"rope_type": "default"})}
        for name, token_id in token_ids.items():
            if token_id is not None and token_id >= section.vocab_size:
                raise ConfigError(
                    f"{name}={token_id}",
                    f"the tokenizer has more ids than vocab_size={section.vocab_size}",
                    "Set model.vocab_size to at least the size of the tokenizer.",
                )
        return cls(**fields, rope_parameters=rope, **token_ids)

    @classmethod
    def from_origin(cls, fields: Mapping[str, Any]) -> "Z2allConfig":
        """Create it from an original Z2all config; missing fields get its defaults."""
        return cls(**{**ORIGIN_DEFAULTS, **fields})

    def to_origin(self) -> dict[str, Any]:
        """Return the same model under the original Z2all names; raise for features the original does not support."""
        computed_there = {
            "head_dim": self.hidden_size // self.num_attention_heads,
            "mlp_bias": False,
            "hidden_act": "silu",
        }
        for name, value in computed_there.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", f"the original Z2all supports only {value}", "Keep Llama's names."
                )
        scaling = {name: value for name, value in self.rope_parameters.items() if name != "rope_theta"}
        rope_type = scaling.pop("rope_type")
        return {
            **{original: getattr(self, original) for original in ORIGINAL_NAMES},
            **{name: getattr(self, name) for name in SAME_NAMES},
            "rope_theta": self.rope_theta,
            "rope_scaling": None if rope_type == "default" else {"type": rope_type, **scaling},
            "rope_interleaved": False,
        }

    def to_llama(self) -> LlamaConfig:
        """Return the stock Llama config of the same model, which loads without this package.

        Z2all's own fields are dropped: dropout matters only in training, and an fp32 residual stream only rounds less.
        """
        fields = self.to_dict()
        for own in ("model_type", "architectures", "transformers_version", "_name_or_path", *OWN_FIELDS):
            fields.pop(own, None)
        return LlamaConfig(**fields, architectures=["LlamaForCausalLM"])


OWN_FIELDS: dict[str, Any] = {name: getattr(Z2allConfig, name) for name in ("dropout1", "dropout2", "residual_in_fp32")}
"""Fields that a Llama config does not have -> default."""


def feed_forward_width(hidden_size: int, multiple_of: int) -> int:
    """Return 8/3 of the hidden size, rounded up to a multiple, as in the original Z2all and Llama 2."""
    return -(-(8 * hidden_size // 3) // multiple_of) * multiple_of


def _under_llama_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under Llama's names; the caller's dicts are not changed."""
    fields = {name: value for name, value in given.items() if name not in ORIGIN_ONLY}
    for original, name in ORIGINAL_NAMES.items():
        if original in fields:
            value = fields.pop(original)
            if fields.setdefault(name, value) != value:
                raise ConfigError(
                    f"{original}={value} and {name}={fields[name]}", "are two names of one size", "Set one of them."
                )
    if fields.pop("rope_interleaved", False):
        raise ConfigError(
            "rope_interleaved=True",
            "Z2all rotates halves, as Llama does",
            "Reorder the rows of q and k, then set it to False.",
        )
    multiple_of = fields.pop("multiple_of", None)
    if fields.get("intermediate_size") is None:
        fields.pop("intermediate_size", None)
        if multiple_of is not None:
            hidden_size = fields.get("hidden_size", LlamaConfig.hidden_size)
            _check_positive("multiple_of", multiple_of)
            _check_positive("hidden_size", hidden_size)
            fields["intermediate_size"] = feed_forward_width(hidden_size, multiple_of)
    for name in ("attention_dropout", *OWN_FIELDS):
        if fields.get(name, 0) is None:
            del fields[name]  # Llama's files may contain null
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(fields.get(name), dict):
            fields[name] = with_rope_type(fields[name])
    return fields


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise a one-line error for invalid fields, where transformers would divide by zero or not notice."""

    def size(name: str, default: Any = None) -> int:
        value = fields.get(name)
        value = (getattr(LlamaConfig, name) if default is None else default) if value is None else value
        return _check_positive(name, value)

    for name in ("intermediate_size", "num_hidden_layers"):
        size(name)
    vocab_size, hidden_size, heads = (size(name) for name in ("vocab_size", "hidden_size", "num_attention_heads"))
    if hidden_size % heads:
        raise ConfigError(
            f"num_attention_heads={heads}", f"must divide hidden_size={hidden_size}", "Change one of the two."
        )
    kv_heads = size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_key_value_heads={kv_heads}", f"must divide num_attention_heads={heads}", "Change one of the two."
        )
    head_dim = size("head_dim", default=hidden_size // heads)
    if head_dim % 2:
        raise ConfigError(
            f"head_dim={head_dim} (hidden_size={hidden_size}, num_attention_heads={heads})",
            "rotary positions rotate pairs, so it must be even",
            "Change the number of heads or the hidden size.",
        )
    _check_rope(fields, head_dim, size("max_position_embeddings"))
    for name in ("attention_dropout", "dropout1", "dropout2"):
        share = fields.get(name, 0.0)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ConfigError(f"{name}={share!r}", "must be at least 0 and below 1", "Use 0 to disable it.")
    if not isinstance(fields.get("residual_in_fp32", False), bool):
        raise ConfigError(f"residual_in_fp32={fields['residual_in_fp32']!r}", "must be True or False", "Fix the value.")
    pad = fields.get("pad_token_id")
    if isinstance(pad, int) and not -vocab_size <= pad < vocab_size:
        raise ConfigError(f"pad_token_id={pad}", f"is not a row of vocab_size={vocab_size}", "Change one of the two.")


def _check_rope(fields: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> None:
    """Check rope fields in transformers' order: `rope_scaling` before `rope_parameters`, its theta before the outer."""
    rope = {
        "rope_theta": fields.get("rope_theta"),
        "original_max_position_embeddings": max_position_embeddings,
        **(fields.get("rope_scaling") or fields.get("rope_parameters") or {}),
    }
    theta, rope_type = rope["rope_theta"], rope.get("rope_type")
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0):
        raise ConfigError(f"rope_theta={theta!r}", "must be a number above 0", "Llama 2 uses 10000.")
    if rope_type in REQUIRED_FIELDS:
        check_rope_fields(rope_type, rope, "rope_scaling")
    if rope_type == "dynamic" and head_dim == 2:
        raise ConfigError("head_dim=2", "dynamic scaling has no effect with a single pair", "Use larger heads.")


def _check_positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}", "must be a whole number above 0", "Fix the value.")
    return value
