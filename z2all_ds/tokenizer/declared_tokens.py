"""Reads which control tokens a Hugging Face folder declares besides those that its tokenizer.json marks as special.

transformers reads them from tokenizer_config.json and special_tokens_map.json. Values of the wrong type are ignored.
added_tokens.json has ids only and declares nothing as special.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from z2all_ds.base.errors import DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.corpus.schema import has_lone_surrogate
from z2all_ds.tokenizer.special_tokens import ROLES

CONFIG_FILE, TOKENS_MAP_FILE = "tokenizer_config.json", "special_tokens_map.json"
_ADDITIONAL = "additional_special_tokens"
_COLLECTIONS = (_ADDITIONAL, "extra_special_tokens", "model_specific_special_tokens")


def read_roles(folder: Path) -> dict[str, str]:
    """Return the tokens that a folder's tokenizer_config.json names; empty without one."""
    return roles_in(read_settings(folder / CONFIG_FILE))


def roles_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that the content of such a file names."""
    texts = {role: _text(settings.get(role)) for role in ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def with_roles(settings: Mapping[str, Any], roles: Mapping[str, str], control_tokens: Collection[str]) -> Any:
    """Return the content of such a file with other roles. Control tokens that only a role declared stay declared."""
    replaced = sorted((set(roles_in(settings).values()) - set(roles.values())) & set(control_tokens))
    others = {_ADDITIONAL: [*_entries(settings.get(_ADDITIONAL)), *replaced]} if replaced else {}
    return {**settings, **roles, **others}


def declared_tokens(folder: Path) -> set[str]:
    """Return all tokens that the files of a folder declare as special.

    transformers ignores special_tokens_map.json where tokenizer_config.json has `added_tokens_decoder`; this does not.
    A single character is text.
    """
    entries: list[Any] = []
    for file in (CONFIG_FILE, TOKENS_MAP_FILE):
        settings = read_settings(folder / file)
        entries += [value for key, value in settings.items() if key.endswith("_token")]  # "image_token", too
        entries += [entry for key in _COLLECTIONS for entry in _entries(settings.get(key))]
        added = _entries(settings.get("added_tokens_decoder"))
        entries += [entry for entry in added if isinstance(entry, dict) and entry.get("special") is True]
    return {text for entry in entries if (text := _text(entry)) is not None and len(text) > 1}


def find_roles(vocabulary: Mapping[str, int], named: Mapping[str, str]) -> dict[str, str]:
    """Return the token of each role: the named one, else that of this package, else SentencePiece's."""
    usual = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    choices = {role: (named.get(role), own, usual.get(role)) for role, own in ROLES.items()}
    found = {role: next((name for name in names if name in vocabulary), None) for role, names in choices.items()}
    return {role: name for role, name in found.items() if name is not None}


def read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty without the file, or if it is not an object."""
    try:
        settings = load_json(read_regular(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"file {file}", f"not readable ({error})", "Use a complete copy.") from None
    return settings if isinstance(settings, dict) else {}


def _entries(collection: Any) -> list[Any]:
    """Return the elements of a list, or the values of an object."""
    if isinstance(collection, dict):
        return list(collection.values())
    return collection if isinstance(collection, list) else []


def _text(entry: Any) -> str | None:
    """Return the text of a token, which may be an object with further settings."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and not has_lone_surrogate(text) else None
