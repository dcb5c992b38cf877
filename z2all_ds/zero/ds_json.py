"""Reads a DeepSpeed JSON and refuses what DeepSpeed would ignore, misread or reject late. Does not load torch.

Every key must be known (`ds_keys.py`), every value of the right type, and no combination may be one that DeepSpeed
trains differently from what it says. Checks that depend on device, ranks or run config are in `ds_config.py`.
"""

import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import ConfigError
from z2all_ds.base.resources import find_named_file
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.zero.ds_keys import FILLED_IN, KNOWN, NOT_HERE, REMOVED_IN_ZERO, REMOVED_TOP_LEVEL, RENAMED_IN_ZERO, Kind


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number, 0 or more", lambda value: _is_number(value) and value == int(value)),
    "positive": ("a whole number, 1 or more", lambda value: _is_number(value) and value == int(value) and value > 0),
    "number": ("a number, 0 or more", _is_number),
    "text": ("a string", lambda value: isinstance(value, str)),
    "texts": ("a list of strings", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)),
}
"""The condition of each kind of value, in words and as a function."""


def load_ds_json(name_or_path: str) -> dict[str, Any]:
    """Return the JSON as it is on disk, completely checked."""
    path = find_named_file(name_or_path, "DeepSpeed JSON", "ds_configs", ".json")
    content = _read(path)
    check_section(content, KNOWN, path.name)
    check_mixes(content, path.name)
    return content


def _read(path: Path) -> dict[str, Any]:
    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section = dict(pairs)
        if len(section) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"{twice} in {path.name}", "is set twice", "Remove one of the two.")
        return section

    try:
        content = json.loads(read_regular(path), object_pairs_hook=without_doubles)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError(f"DeepSpeed JSON {path}", rule, "Use a readable file.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"DeepSpeed JSON {path}", f"not valid JSON ({error})", "Fix the file.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"DeepSpeed JSON {path}", "must be one JSON object", "See ds_configs/zero2.json.")
    return content


def check_section(section: dict[str, Any], known: dict[str, Any], file: str, above: str = "") -> None:
    """Check keys and value types of a section and its subsections; `above` is its dotted name with a trailing dot."""
    for key, value in section.items():
        dotted = above + key
        if key not in known:
            raise ConfigError(f"{dotted} in {file}", *_why_unknown(key, known, above))
        if value == "auto":
            raise ConfigError(f'{dotted}="auto" in {file}', "DeepSpeed itself does not support auto", "Set a value.")
        kind: Kind = known[key]
        if isinstance(kind, dict) and isinstance(value, dict):
            check_section(value, kind, file, f"{dotted}.")
        elif not _is_of(kind, value, may_be_null=bool(above)):
            what = f"{dotted}={json.dumps(value)} in {file}"
            if isinstance(kind, dict):
                raise ConfigError(what, "must be a JSON object", 'For example "bf16": {"enabled": true}.')
            if isinstance(kind, tuple):
                words = ", ".join(map(str, kind[:-1])) + f" or {kind[-1]}"
                fix = "Use the number." if isinstance(kind[0], int) else "Use one of them."
                raise ConfigError(what, f"must be {words}", fix)
            fix = "Remove the quotes." if isinstance(value, str) else "Fix the value."
            raise ConfigError(what, f"must be {CHECKS[kind][0]}", fix)


def _why_unknown(key: str, known: dict[str, Any], above: str) -> tuple[str, str]:
    """Return rule and fix."""
    if not above and key in FILLED_IN:
        return f"the run config sets it ({FILLED_IN[key]})", "Remove it from the JSON."
    if above + key in NOT_HERE:
        return f"cannot be used here: {NOT_HERE[above + key]}", "Remove it."
    in_zero = above == "zero_optimization."
    if in_zero and key in RENAMED_IN_ZERO:
        return "DeepSpeed has renamed it", f"Use {RENAMED_IN_ZERO[key]}."
    if (not above and key in REMOVED_TOP_LEVEL) or (in_zero and key in REMOVED_IN_ZERO):
        return "DeepSpeed no longer has it", "Remove it."
    near = difflib.get_close_matches(key, known, n=1)
    fix = f"Did you mean {above}{near[0]}?" if near else "Remove it."
    if above:
        return f"DeepSpeed has no such key in {above.rstrip('.')}", fix
    return "DeepSpeed has no such top-level key and would ignore it", fix


def _is_of(kind: Kind, value: Any, may_be_null: bool) -> bool:
    if value is None:  # means "not set"; DeepSpeed fails if a top-level section is null
        return may_be_null
    if isinstance(kind, tuple):
        return value in kind and not isinstance(value, bool)
    return not isinstance(kind, dict) and CHECKS[kind][1](value)


def zero_section(content: dict[str, Any]) -> dict[str, Any]:
    return content.get("zero_optimization") or {}


def offload_device(content: dict[str, Any], what: str) -> str:
    """Return none, cpu or nvme; `what` is offload_optimizer or offload_param."""
    return str((zero_section(content).get(what) or {}).get("device") or "none")


def check_mixes(content: dict[str, Any], file: str) -> None:
    """Check combinations of settings that are each valid by themselves."""
    for is_wrong, what, rule, fix in _mixes(content):
        if is_wrong:
            raise ConfigError(f"{what} in {file}", rule, fix)


def _mixes(content: dict[str, Any]) -> Iterator[tuple[Any, str, str, str]]:
    """Yield whether a rule is violated, the setting, the rule and the fix."""
    zero, bf16, fp16 = zero_section(content), content.get("bf16", {}), content.get("fp16", {})
    stage = zero.get("stage") or 0
    both = bf16.get("enabled") and fp16.get("enabled")
    yield both, "bf16 and fp16", "both are enabled", "Disable one of the two."

    optimizer, weights = offload_device(content, "offload_optimizer"), offload_device(content, "offload_param")
    what = "offload_optimizer at stage 0"
    yield optimizer != "none" and stage == 0, what, "DeepSpeed would ignore it", "Use stage 1, 2 or 3."
    ratio = (zero.get("offload_optimizer") or {}).get("ratio", 1)
    yield ratio > 1, f"offload_optimizer.ratio={ratio}", "must be from 0 to 1", "Fix the value."
    hpz = zero.get("zero_hpz_partition_size") or 1
    for is_set, what, rule in (
        # At stages 1 and 2 DeepSpeed silently keeps the states in host memory; with bf16 and fp32 accumulation at stage
        # 1 it does not offload at all.
        (optimizer == "nvme", "offload_optimizer.device=nvme", "only stage 3 writes to a disk"),
        (weights != "none", "offload_param", "only stage 3 offloads weights"),
        (ratio < 1, f"offload_optimizer.ratio={ratio}", "only stage 3 offloads a part"),
        (hpz > 1, f"zero_hpz_partition_size={hpz}", "weights are sharded only at stage 3"),
    ):
        yield is_set and stage < 3, f"{what} at stage {stage}", rule, "Use stage 3, or remove it."

    is_divided = content.get("prescale_gradients") or content.get("gradient_predivide_factor", 1) != 1
    is_refused = is_divided and stage >= 2 and zero.get("reduce_scatter", True)
    what = f"prescale_gradients or gradient_predivide_factor at stage {stage}"
    fix = "Remove it, or set reduce_scatter false."
    yield is_refused, what, "DeepSpeed cannot do this with reduce_scatter", fix
    is_sum = content.get("gradient_allreduce_op") == "sum"
    yield is_sum, "gradient_allreduce_op=sum", "gradients would grow with the number of ranks", "Remove it."
    bucket = zero.get("allgather_bucket_size", 0) or 0
    yield bucket % 2, f"allgather_bucket_size={bucket}", "must be even at stages 1 and 2", "Add 1."

    master = "bf16_master_weights_and_grads"
    yield bf16.get(master) and stage == 0, f"bf16.{master} at stage 0", "needs ZeRO", "Use stage 1, 2 or 3."
    is_alone = bf16.get("bf16_optimizer_states") and not bf16.get(master)
    yield is_alone, "bf16.bf16_optimizer_states", f"requires {master}", f"Set {master} true too."
    is_fp16_master = fp16.get("fp16_master_weights_and_grads") and optimizer == "none"
    rule = "DeepSpeed supports it only for offloaded states"
    yield is_fp16_master, "fp16.fp16_master_weights_and_grads", rule, "Remove it, or add offload_optimizer."
    compute = next((dtype for dtype in ("bf16", "fp16") if content.get(dtype, {}).get("enabled")), "fp32")
    other = {"bf16": "fp16", "fp16": "bf16"}.get(compute, "")
    for key, dtype in {
        "data_types.grad_accum_dtype": content.get("data_types", {}).get("grad_accum_dtype"),
        "communication_data_type": content.get("communication_data_type"),
    }.items():
        rule = "gradients would lose range or precision"
        yield dtype == other, f"{key}={dtype} with {compute}", rule, f"Use fp32 or {compute}."
