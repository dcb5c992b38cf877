"""Writes a tokenizer as a Hugging Face folder, whole or not at all, and knows again what it wrote.

AutoTokenizer opens the folder without this package and without remote code. `training.json` beside it says what the
folder was made from.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from z2all_ds.base.atomic import explain_disk_errors, force_to_disk, temporary_name
from z2all_ds.base.errors import ConfigError, MachineError
from z2all_ds.tokenizer.special_tokens import CHAT_TEMPLATE, ROLES, SPECIAL_TOKENS

RECIPE_FILE = "training.json"


def add_control_tokens(backend: Tokenizer, text_vocab_size: int) -> None:
    """Right after the text vocabulary."""
    backend.add_special_tokens([control_token(name) for name in SPECIAL_TOKENS])
    numbers = [backend.token_to_id(name) for name in SPECIAL_TOKENS]
    # Spelled-out control tokens were cut at their signs while learning, so none of them can be in the vocabulary yet.
    assert numbers == list(range(text_vocab_size, text_vocab_size + len(SPECIAL_TOKENS)))


def control_token(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def write_folder(
    backend: Tokenizer,
    out_dir: Path,
    recipe: Mapping[str, Any],
    extra_files: Mapping[str, bytes] | None = None,
    safe_by_default: bool = False,
) -> None:
    """Everything into a temporary folder beside the final one, forced to disk, then one rename."""
    from transformers import PreTrainedTokenizerFast  # seconds to import, and needed here alone

    with explain_disk_errors(out_dir.parent):
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(out_dir)
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed training
        try:
            PreTrainedTokenizerFast(
                tokenizer_object=backend,
                **ROLES,
                clean_up_tokenization_spaces=False,
                # Causal training wants text at the front, where positions start at 0 and labels line up; generating
                # for a batch wants "left", which the caller sets for that.
                padding_side="right",
                chat_template=CHAT_TEMPLATE,
                split_special_tokens=safe_by_default,
            ).save_pretrained(str(temporary))
            config_path = temporary / "tokenizer_config.json"
            config = json.loads(config_path.read_text("utf-8"))
            # transformers 5 writes a class name that 4 does not know; both know this one
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            # Left out where it is the default, and a folder should say what it does.
            config |= {"padding_side": "right", "split_special_tokens": safe_by_default}
            config_path.write_text(_json(config), "utf-8")
            (temporary / RECIPE_FILE).write_text(_json(recipe), "utf-8")
            for name, data in (extra_files or {}).items():
                (temporary / name).write_bytes(data)
            for path in sorted(temporary.iterdir()):
                force_to_disk(path)
            force_to_disk(temporary)
            os.replace(temporary, out_dir)  # an empty folder gives way, a filled one does not
            force_to_disk(out_dir.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def check_place(out_dir: Path) -> None:
    """Refuses a place that cannot be written, before an hour of work instead of after it."""
    ancestor = next(path for path in out_dir.absolute().parents if path.exists())
    if not ancestor.is_dir():
        raise ConfigError(f"folder {out_dir}", f"{ancestor} is a file", "Choose another folder.")
    if not os.access(ancestor, os.W_OK) or not _accepts_files(ancestor):
        raise MachineError(f"folder {ancestor}", "not writable", "Choose another folder or change its owner.")


def _accepts_files(folder: Path) -> bool:
    """Root is told that it may write anywhere; /proc and read-only mounts disagree."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def is_filled(out_dir: Path) -> bool:
    """Something is there already; a plain file counts."""
    return out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir()))


def read_recipe(out_dir: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What training.json says, of a folder that was made with the wanted settings; any other is refused."""
    try:
        values: dict[str, Any] = json.loads((out_dir / RECIPE_FILE).read_text("utf-8"))
        same = all(values[name] == value for name, value in wanted.items())
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        rule = "it holds something else than the tokenizer of this text with these settings"
        raise ConfigError(f"folder {out_dir}", rule, "Choose another folder, or remove that one first.")
    return values


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
