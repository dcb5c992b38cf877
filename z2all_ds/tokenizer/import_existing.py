"""Imports an existing tokenizer: a tokenizer.json, a Hugging Face folder or a SentencePiece .model.

Its ids do not change. The control tokens of this package are added after them or at given ids; ids in between are
filled with reserved tokens, because a vocabulary with gaps has fewer entries than its largest id requires. If the
tokenizer cannot reproduce text exactly (NFKC, lower-casing, unknown characters), a warning gives an example.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.tokenizer.folder import (
    add_control_tokens,
    check_writable,
    is_filled,
    read_recipe,
    reserved_name,
    write_folder,
)
from z2all_ds.tokenizer.special_tokens import SPECIAL_TOKENS
from z2all_ds.tokenizer.spm import MODEL_FILE
from z2all_ds.tokenizer.spm_model import parse_spm_model, spm_to_backend
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE, Z2allTokenizer, load_tokenizer, parse_tokenizer_json

PROBES = (
    "The Quick Brown Fox, 3.14 and 2024-12-31!",
    "今天的天气真不错，我们出去走走。",
    "def f(x):\n    if x:\n\t\treturn  x\r\n",
    "  two blanks in front and behind  ",
    "Ａ full-width, ① and ﬁ",
    "cafe\u0301 and café",
    "😀 𠀀 \u2581 \u00a0 \ufeff \x00 \x7f",
    "<0x0A> <unk> [UNK]",
)
"""Texts that some tokenizers do not reproduce."""
_FORMATS = "Give a tokenizer.json, a Hugging Face folder, or a SentencePiece .model."


@dataclass(frozen=True)
class ImportReport:
    """Ids and warnings of an imported tokenizer."""

    folder: Path
    text_vocab_size: int
    """Number of original ids."""
    size: int
    special_ids: dict[str, int]
    warnings: list[str]
    fingerprint: str


def import_tokenizer(
    file: str | Path,
    out_dir: str | Path,
    *,
    special_ids: Mapping[str, int] | None = None,
    special_start: int | None = None,
    strict: bool = False,
    safe_by_default: bool = False,
) -> ImportReport:
    """Import `file`; with `strict`, warnings are errors. The same call again returns at once."""
    path, out_dir = find_file(Path(file)), Path(out_dir)
    data = path.read_bytes()
    recipe = {
        "imported_sha256": hashlib.sha256(data).hexdigest(),
        "special_ids": dict(special_ids or {}),
        "special_start": special_start,
        "safe_by_default": safe_by_default,
    }
    if is_filled(out_dir):
        values = read_recipe(out_dir, recipe)
        _refuse_if(strict, path, values["warnings"])
        return _report(out_dir, values)
    check_writable(out_dir)

    backend = open_existing(path, data)
    warnings = _remove_additions(backend)
    backend = _fill_gaps(backend, path)
    text_vocab_size = backend.get_vocab_size(with_added_tokens=True)
    ids = place_special_tokens(backend.get_vocab(with_added_tokens=True), special_ids or {}, special_start)
    add_control_tokens(backend, ids)
    warnings += _losses(backend)
    _refuse_if(strict, path, warnings)
    for warning in warnings:
        say(f"warning: {path.name}: {warning}")
    extra_files = {MODEL_FILE: data} if path.suffix == ".model" else {}
    values = {**recipe, "text_vocab_size": text_vocab_size, "warnings": warnings}
    write_folder(backend, out_dir, values, extra_files, safe_by_default)
    return _report(out_dir, values)


def _refuse_if(strict: bool, path: Path, warnings: Sequence[str]) -> None:
    if strict and warnings:
        raise DataError(f"tokenizer {path}", warnings[0], "Leave out --strict to accept it.")


def parse_special_ids(given: Sequence[str]) -> dict[str, int]:
    """Parse `["<|PAD|>=64006"]` to `{"<|PAD|>": 64006}`."""
    ids: dict[str, int] = {}
    for one in given:
        name, _, number = one.rpartition("=")
        if not name or not number.isdecimal():
            raise ConfigError(f"special {one!r}", "not NAME=ID", "Write e.g. '<|PAD|>=64006', in quotes.")
        if ids.setdefault(name, int(number)) != int(number):
            raise ConfigError(f"special {one!r}", f"{name} also has id {ids[name]}", "Give it once.")
    return ids


def find_file(path: Path) -> Path:
    """Return the file itself, or the one in a folder: tokenizer.json, else the only .model."""
    if path.is_dir():
        found = [path / TOKENIZER_FILE] if (path / TOKENIZER_FILE).is_file() else sorted(path.glob("*.model"))
        if len(found) != 1:
            rule = f"it has neither {TOKENIZER_FILE} nor exactly one .model"
            raise DataError(f"folder {path}", rule, _FORMATS)
        return found[0]
    if not path.is_file():
        raise DataError(f"tokenizer {path}", "no such file", _FORMATS)
    return path


def place_special_tokens(vocabulary: Mapping[str, int], given: Mapping[str, int], start: int | None) -> dict[str, int]:
    """Return ids for all control tokens. One that is in the vocabulary keeps its id."""
    end = max(vocabulary.values(), default=-1) + 1
    taken_rule = f"ids 0 to {end - 1} are used by the tokenizer"
    if start is not None and start < end:
        raise ConfigError(f"special start {start}", taken_rule, f"Start at {end} or later.")
    ids: dict[str, int] = {}
    for offset, name in enumerate(SPECIAL_TOKENS):
        if name in vocabulary:
            ids[name] = vocabulary[name]
        elif start is not None:
            ids[name] = start + offset
    for name, number in given.items():
        existing = vocabulary.get(name)
        if existing not in (None, number):
            fix = f"Write {name}={existing}, or leave it out."
            raise ConfigError(f"special {name}={number}", f"the tokenizer already has it as {existing}", fix)
        if existing is None and number < end:
            raise ConfigError(f"special {name}={number}", taken_rule, f"Choose {end} or more.")
        ids[name] = number
    names = {number: name for name, number in ids.items()}
    for name, number in ids.items():
        if names[number] != name:
            raise ConfigError(f"special {name}={number}", f"{names[number]} has the same id", "Give each its own.")
    free = (number for number in range(end, end + len(ids) + len(SPECIAL_TOKENS)) if number not in names)
    return {**ids, **{name: next(free) for name in SPECIAL_TOKENS if name not in ids}}


def open_existing(path: Path, data: bytes) -> Tokenizer:
    """Return the tokenizer in a file, unchanged."""
    where = f"tokenizer {path}"
    if path.suffix == ".model":
        return spm_to_backend(parse_spm_model(data, where), where)
    return parse_tokenizer_json(data, where, _FORMATS)


def _remove_additions(backend: Tokenizer) -> list[str]:
    """Turn off truncation, padding and tokens added around a text, as packing adds its own; return warnings."""
    backend.no_truncation()
    backend.no_padding()
    plain = backend.encode("a", add_special_tokens=False).tokens
    added = [name for name in backend.encode("a").tokens if name not in plain]
    if not added:
        return []
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return [f"it put {' '.join(added)} around every text; this was removed, as packing adds its own"]


def _fill_gaps(backend: Tokenizer, path: Path) -> Tokenizer:
    """Give unused ids to reserved tokens: `tokenizers` numbers new tokens by count, and they would collide."""
    used = set(backend.get_vocab(with_added_tokens=True).values())
    gaps = sorted(set(range(max(used, default=-1) + 1)) - used)
    if not gaps:
        return backend
    rules: dict[str, Any] = json.loads(backend.to_str())
    if not isinstance(rules["model"]["vocab"], dict):
        raise DataError(f"tokenizer {path}", f"id {gaps[0]} is missing", "Give a tokenizer without gaps.")
    rules["model"]["vocab"] |= {reserved_name(number): number for number in gaps}
    return Tokenizer.from_str(json.dumps(rules, ensure_ascii=False))


def _losses(backend: Tokenizer) -> list[str]:
    """Return a warning for text that is not reproduced, and one for text that becomes a control token."""
    tokenizer = Z2allTokenizer(backend, "")
    found = []
    for text in PROBES:
        back = tokenizer.decode(tokenizer.encode(text))
        if back != text:
            found.append(f"text is not reproduced exactly: {text!r} becomes {back!r}")
            break
    unknown = tokenizer.encode("\U000f0000")  # in no text: gives a token for unknown characters, or bytes
    for name, number in tokenizer.special_tokens.items():
        if number not in unknown and number in tokenizer.encode(f"a {name} b") + tokenizer.encode(name):
            found.append(f"{name} in a text becomes the control token {number}")
            break
    return found


def _report(out_dir: Path, values: Mapping[str, Any]) -> ImportReport:
    tokenizer = load_tokenizer(out_dir)
    return ImportReport(
        folder=out_dir,
        text_vocab_size=values["text_vocab_size"],
        size=tokenizer.size,
        special_ids={name: tokenizer.special_tokens[name] for name in SPECIAL_TOKENS},
        warnings=values["warnings"],
        fingerprint=tokenizer.fingerprint,
    )
