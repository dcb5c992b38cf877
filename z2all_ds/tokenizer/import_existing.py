"""Imports an existing tokenizer: a tokenizer.json, a Hugging Face folder or a SentencePiece .model.

Its ids do not change. Imported as it is, it gets no further tokens. Otherwise the control tokens of this package are
added after them or at given ids; ids in between are filled with reserved tokens, because a vocabulary with gaps has
fewer entries than its largest id requires. If the tokenizer cannot reproduce text exactly (NFKC, lower-casing, unknown
characters), a warning gives an example.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from z2all_ds.base.console import say
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.tokenizer.declared_tokens import (
    CONFIG_FILE,
    TOKENS_MAP_FILE,
    declared_tokens,
    read_roles,
    read_settings,
    with_roles,
)
from z2all_ds.tokenizer.folder import (
    add_control_tokens,
    check_writable,
    is_filled,
    mark_control_tokens,
    read_recipe,
    reserved_name,
    write_folder,
)
from z2all_ds.tokenizer.special_tokens import SPECIAL_TOKENS
from z2all_ds.tokenizer.spm import MODEL_FILE
from z2all_ds.tokenizer.spm_backend import CONVERSION, differences, spm_to_backend
from z2all_ds.tokenizer.spm_model import SPACE_MARK, parse_spm_model
from z2all_ds.tokenizer.tokenization_z2all import (
    TOKENIZER_FILE,
    Z2allTokenizer,
    load_tokenizer,
    parse_tokenizer_json,
)

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
MOST_RESERVED = 100_000
"""Unused ids become reserved tokens, each with a row in the model. Ids of billions would fill the memory."""
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
    as_is: bool = False,
    eos: str = "",
) -> ImportReport:
    """Import `file`; with `strict`, warnings are errors. The same call again returns at once.

    `as_is` adds no tokens: documents end with the tokenizer's own end-of-text token, or with `eos`, which implies it.
    """
    path, out_dir = find_file(Path(file)), Path(out_dir)
    data = read_regular(path)
    recipe = {
        "imported_sha256": hashlib.sha256(data).hexdigest(),
        "special_ids": dict(special_ids or {}),
        "special_start": special_start,
        "safe_by_default": safe_by_default,
    }
    if not _is_json(data):
        recipe["conversion"] = CONVERSION
    as_is = as_is or bool(eos)
    if as_is:
        if special_ids or special_start is not None:
            raise ConfigError("special", "no tokens are added to a tokenizer as it is", "Leave out one of the two.")
        if safe_by_default:
            raise ConfigError("safe by default", "a tokenizer as it is is not changed", "Leave out one of the two.")
        recipe |= {"as_is": True, "eos": eos}
    if is_filled(out_dir):
        values = read_recipe(out_dir, recipe, ("text_vocab_size", "warnings"))
        _refuse_if(strict, path, values["warnings"])
        return _report(out_dir, values)
    check_writable(out_dir)

    backend, declared = open_existing(path, data), declared_tokens(path.parent)
    if not (as_is and _is_json(data)):  # else the new folder declares them as the old one does
        mark_control_tokens(backend, declared | {name.replace(SPACE_MARK, " ") for name in declared})
    if as_is:
        return _write_as_is(backend, path, data, out_dir, recipe, eos, strict)
    with explain_content(DataError, f"tokenizer {path}", "does not work", _FORMATS):
        warnings = _remove_additions(backend)
        backend = _fill_gaps(backend, path)
        text_vocab_size = backend.get_vocab_size(with_added_tokens=True)
        ids = place_special_tokens(backend.get_vocab(with_added_tokens=True), special_ids or {}, special_start)
        add_control_tokens(backend, ids)
        warnings += _losses(Z2allTokenizer(backend, ""), data) + _other_ids(path, data)
    _report_warnings(strict, path, warnings)
    extra_files = {} if _is_json(data) else {MODEL_FILE: data}
    values = {**recipe, "text_vocab_size": text_vocab_size, "warnings": warnings}
    write_folder(backend, out_dir, values, extra_files, safe_by_default)
    return _report(out_dir, values)


def _write_as_is(
    backend: Tokenizer, path: Path, data: bytes, out_dir: Path, recipe: Mapping[str, Any], eos: str, strict: bool
) -> ImportReport:
    """Write a folder with the same tokenizer.json and the files of its folder; only the end of documents may differ."""
    template = path.with_name("chat_template.jinja")
    roles = {**read_roles(path.parent), **({"eos_token": eos} if eos else {})}
    with explain_content(DataError, f"tokenizer {path}", "does not work", _FORMATS):
        tokenizer = Z2allTokenizer(backend, "", roles, declared_tokens(path.parent))
        if eos and tokenizer.roles["eos_token"] != eos:
            raise ConfigError(f"eos {eos!r}", "the tokenizer has no such token", "Name one that it has.")
        warnings = _losses(tokenizer, data) + _other_ids(path, data)
    _report_warnings(strict, path, warnings)
    is_json = _is_json(data)
    extra_files = {TOKENIZER_FILE: data} if is_json else {MODEL_FILE: data}
    if is_json and template.is_file():
        extra_files[template.name] = read_regular(template)
    for name in (CONFIG_FILE, TOKENS_MAP_FILE) if is_json else ():
        if config := read_settings(path.with_name(name)):
            config = with_roles(config, tokenizer.roles, tokenizer.special_tokens)
            extra_files[name] = (json.dumps(config, indent=2) + "\n").encode()
    values = {**recipe, "text_vocab_size": tokenizer.size, "warnings": warnings}
    write_folder(backend, out_dir, values, extra_files, False, tokenizer.roles, chat_template=None)
    return _report(out_dir, values)


def _report_warnings(strict: bool, path: Path, warnings: Sequence[str]) -> None:
    _refuse_if(strict, path, warnings)
    for warning in warnings:
        say(f"warning: {path.name}: {warning}")


def _refuse_if(strict: bool, path: Path, warnings: Sequence[str]) -> None:
    if strict and warnings:
        raise DataError(f"tokenizer {path}", warnings[0], "Leave out --strict to accept it.")


def parse_special_ids(given: Sequence[str]) -> dict[str, int]:
    """Parse `["<|PAD|>=64006"]` to `{"<|PAD|>": 64006}`."""
    ids: dict[str, int] = {}
    for one in given:
        name, _, number = one.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,9}", number):
            raise ConfigError(f"special {one!r}", "not NAME=ID", "Write e.g. '<|PAD|>=64006', in quotes.")
        if ids.setdefault(name, int(number)) != int(number):
            raise ConfigError(f"special {one!r}", f"{name} also has id {ids[name]}", "Give it once.")
    return ids


def find_file(path: Path) -> Path:
    """Return the file itself, or the one in a folder: tokenizer.json, else the only one that can be a tokenizer."""
    if path.is_dir():
        found = [path / TOKENIZER_FILE]
        if not found[0].is_file():
            found = [*sorted(path.glob("*.model")), *(file for file in sorted(path.glob("*.json")) if _has_model(file))]
        if len(found) != 1:
            names = f"{len(found)} tokenizers: {', '.join(file.name for file in found)}" if found else "no tokenizer"
            raise DataError(f"folder {path}", f"it has {names}", f"{_FORMATS} Name the file itself if in doubt.")
        return found[0]
    if not path.is_file():
        raise DataError(f"tokenizer {path}", "no such file", _FORMATS)
    return path


def _has_model(file: Path) -> bool:
    """Return whether a JSON file is a tokenizer of `tokenizers` and not a config."""
    try:
        content = load_json(read_regular(file))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("model"), dict) and "added_tokens" in content


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
        if number >= end + MOST_RESERVED:
            raise ConfigError(f"special {name}={number}", taken_rule, f"Choose less than {end + MOST_RESERVED}.")
        if names[number] != name:
            raise ConfigError(f"special {name}={number}", f"{names[number]} has the same id", "Give each its own.")
    free = (number for number in range(end, end + len(ids) + len(SPECIAL_TOKENS)) if number not in names)
    return {**ids, **{name: next(free) for name in SPECIAL_TOKENS if name not in ids}}


def open_existing(path: Path, data: bytes) -> Tokenizer:
    """Return the tokenizer in a file, unchanged."""
    where = f"tokenizer {path}"
    if not _is_json(data):
        return spm_to_backend(parse_spm_model(data, where), where)
    return parse_tokenizer_json(data, where, _FORMATS)


def _is_json(data: bytes) -> bool:
    """Return whether a file is a tokenizer.json rather than a SentencePiece model."""
    return data.lstrip().startswith(b"{")


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
    end = max(used, default=-1) + 1
    if end - len(used) > MOST_RESERVED:
        rule = f"it has {len(used):,} tokens with ids up to {end - 1:,}"
        raise DataError(f"tokenizer {path}", rule, f"Give one with at most {MOST_RESERVED:,} unused ids.")
    gaps = sorted(set(range(end)) - used)
    if not gaps:
        return backend
    rules: dict[str, Any] = json.loads(backend.to_str())
    if not isinstance(rules["model"]["vocab"], dict):
        raise DataError(f"tokenizer {path}", f"id {gaps[0]} is missing", "Give a tokenizer without gaps.")
    rules["model"]["vocab"] |= {reserved_name(number): number for number in gaps}
    return Tokenizer.from_str(json.dumps(rules, ensure_ascii=False))


def _other_ids(path: Path, data: bytes) -> list[str]:
    """Return a warning for each kind of text to which SentencePiece gives other ids."""
    return [] if _is_json(data) else differences(parse_spm_model(data, f"tokenizer {path}"))


def _losses(tokenizer: Z2allTokenizer, data: bytes) -> list[str]:
    """Return a warning for text that is not reproduced, and one for text that becomes a control token.

    A SentencePiece model cannot distinguish U+2581 from a space.
    """
    found = []
    for probe in PROBES:
        text = probe if _is_json(data) else probe.replace(SPACE_MARK, " ")
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
        special_ids={
            name: tokenizer.special_tokens[name]
            for name in (tokenizer.roles.values() if values.get("as_is") else SPECIAL_TOKENS)
        },
        warnings=values["warnings"],
        fingerprint=tokenizer.fingerprint,
    )
