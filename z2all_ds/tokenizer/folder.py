"""Writes a tokenizer as a Hugging Face folder, atomically, and recognizes folders that it wrote.

AutoTokenizer opens the folder without this package and without remote code. `training.json` in it records the inputs.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from z2all_ds.base.atomic import explain_disk_errors, force_to_disk
from z2all_ds.base.atomic_folder import atomic_folder
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.tokenizer.special_tokens import CHAT_TEMPLATE, ROLES

RECIPE_FILE = "training.json"


def add_control_tokens(backend: Tokenizer, ids: Mapping[str, int]) -> None:
    """Add control tokens in the order of their ids, with reserved tokens in gaps: `tokenizers` numbers by count."""
    names = {number: name for name, number in ids.items()}
    first = backend.get_vocab_size(with_added_tokens=True)
    existing = [names[number] for number in sorted(names) if number < first]
    new = [names.get(number, reserved_name(number)) for number in range(first, max(names) + 1)]
    for some in (existing, new):
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in some])
    for name, number in ids.items():
        assert backend.token_to_id(name) == number, f"{name} is {backend.token_to_id(name)}, not {number}"


def mark_control_tokens(backend: Tokenizer, names: Set[str]) -> None:
    """Mark those of the names that the backend has as control tokens; their ids do not change."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = [added.get(name, AddedToken(name, normalized=False)) for name in sorted(vocabulary.keys() & names)]
    for token in tokens:
        token.special = True
    backend.add_special_tokens(tokens)


def reserved_name(number: int) -> str:
    return f"<|reserved_{number}|>"


def write_folder(
    backend: Tokenizer,
    out_dir: Path,
    recipe: Mapping[str, Any],
    extra_files: Mapping[str, bytes],
    safe_by_default: bool,
    roles: Mapping[str, str] = ROLES,
    chat_template: str | None = CHAT_TEMPLATE,
) -> None:
    """Write all files to a temporary folder, force them to disk, and rename the folder. `extra_files` replace others
    of the same name."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    with explain_disk_errors(out_dir.parent), atomic_folder(out_dir) as temporary:
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            **roles,
            clean_up_tokenization_spaces=False,
            # For training: positions start at 0 and labels line up. Batched generation needs "left", which the caller
            # sets.
            padding_side="right",
            chat_template=chat_template,
            split_special_tokens=safe_by_default,
        ).save_pretrained(str(temporary))
        config_path = temporary / "tokenizer_config.json"
        config = load_json(config_path.read_text("utf-8"))
        # transformers 5 writes a class name that 4 does not know; both know this one
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config |= {"padding_side": "right", "split_special_tokens": safe_by_default}  # written also if default
        config_path.write_text(_json(config), "utf-8")
        (temporary / RECIPE_FILE).write_text(_json(recipe), "utf-8")
        for name, data in extra_files.items():
            (temporary / name).write_bytes(data)
        for path in [*sorted(temporary.iterdir()), temporary]:
            force_to_disk(path)


def check_writable(out_dir: Path) -> None:
    """Refuse a folder that cannot be written, before the work instead of after it."""
    ancestor = next(path for path in out_dir.absolute().parents if path.exists())
    if not ancestor.is_dir():
        raise ConfigError(f"folder {out_dir}", f"{ancestor} is a file", "Choose another folder.")
    try:
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError:
        raise MachineError(f"folder {ancestor}", "not writable", "Choose another folder or change its owner.") from None


def is_filled(out_dir: Path) -> bool:
    """Return whether the path is a file or a folder that is not empty."""
    return out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir()))


def read_recipe(out_dir: Path, wanted: Mapping[str, Any], results: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of training.json; refuse a folder that was not made with the `wanted` settings, or that lacks
    the `results`."""
    try:
        values: dict[str, Any] = load_json(read_regular(out_dir / RECIPE_FILE))
        same = all(values[name] == value for name, value in wanted.items()) and values.keys() >= set(results)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        same = False
    if not same:
        rule = "contains something else than the tokenizer of this text with these settings"
        raise ConfigError(f"folder {out_dir}", rule, "Choose another folder, or remove this one first.")
    return values


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
