"""Scaling of rotary positions beyond the trained length: the four supported types and their fields; no torch.

The run config and Hugging Face configs share this check, so both report the same mistake in the same words.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from z2all_ds.base.errors import ConfigError

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""Rope type -> required fields."""
OPTIONAL_FIELDS: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def with_rope_type(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with the key `rope_type`; files of transformers 4 call it `type`."""
    fields = dict(scaling)
    old_name = fields.pop("type", None)
    if old_name is not None:
        fields.setdefault("rope_type", old_name)
    return fields


def check_rope_scaling(scaling: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the scaling with `rope_type` first; raise ConfigError if it is invalid."""
    fields = with_rope_type(scaling)
    rope_type = fields.pop("rope_type", None)
    known = ", ".join(REQUIRED_FIELDS)
    if rope_type is None:
        raise ConfigError(where, "has no rope_type", f"Use one of {known}.")
    if not isinstance(rope_type, str) or rope_type not in REQUIRED_FIELDS:
        raise ConfigError(f"{where}.rope_type={rope_type}", "unknown scaling type", f"Use one of {known}.")
    allowed = (*REQUIRED_FIELDS[rope_type], *OPTIONAL_FIELDS.get(rope_type, ()))
    for name in fields:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            fix = f"Did you mean {near[0]}?" if near else f"Known fields: {', '.join(allowed)}."
            raise ConfigError(f"{where}.{name}", f"{rope_type} scaling has no such field", fix)
    check_rope_fields(rope_type, fields, where)
    return {"rope_type": rope_type, **fields}


def check_rope_fields(rope_type: str, fields: Mapping[str, Any], where: str) -> None:
    """Check that the required values of a known type are present and valid; unknown fields are ignored."""
    for name in REQUIRED_FIELDS[rope_type]:
        if fields.get(name) is None:
            raise ConfigError(where, f"{rope_type} scaling needs {name}", f"Set {where}.{name}=...")
    for name in (*REQUIRED_FIELDS[rope_type], *OPTIONAL_FIELDS.get(rope_type, ())):
        value = fields.get(name)
        if value is None or name == "truncate":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{where}.{name}={value!r}", "must be a number", "Fix the value.")
        if name == "original_max_position_embeddings" and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}.{name}={value!r}", "is a number of tokens", "Use a whole number above 0.")
    if fields["factor"] < 1:
        raise ConfigError(f"{where}.factor={fields['factor']}", "must be at least 1", "Use new length / old length.")
    truncate = fields.get("truncate")
    if rope_type == "yarn" and truncate is not None and not isinstance(truncate, bool):
        raise ConfigError(f"{where}.truncate={truncate!r}", "must be true or false", "Fix the value.")
    if rope_type == "llama3" and not fields["high_freq_factor"] > fields["low_freq_factor"] > 0:
        raise ConfigError(
            f"{where}: low_freq_factor={fields['low_freq_factor']}, high_freq_factor={fields['high_freq_factor']}",
            "both must be above 0, and high_freq_factor above low_freq_factor",
            "Llama 3 uses 1 and 4.",
        )
