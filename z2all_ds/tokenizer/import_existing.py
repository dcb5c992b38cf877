"""Adopts a tokenizer that exists already: a tokenizer.json, a Hugging Face folder or a SentencePiece .model.

Its ids stay as they are. The control tokens of this package are added behind them or at given ids; numbers in between
are filled with reserved tokens, since a vocabulary with holes has fewer entries than its largest id says.
What it cannot give back exactly (NFKC, lower-casing, unknown characters) is said with an example.
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
from z2all_ds.tokenizer.folder import check_place, control_token, is_filled, read_recipe, write_folder
from z2all_ds.tokenizer.special_tokens import SPECIAL_TOKENS
from z2all_ds.tokenizer.spm import MODEL_FILE
from z2all_ds.tokenizer.spm_convert import spm_to_backend
from z2all_ds.tokenizer.spm_model import parse_spm_model
from z2all_ds.tokenizer.tokenization_z2all import TOKENIZER_FILE, Z2allTokenizer, load_tokenizer

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
"""Each shows a kind of loss that tokenizers are known for."""


@dataclass(frozen=True)
class ImportReport:
    """What was adopted."""

    folder: Path
    text_vocab_size: int
    """Ids of the tokenizer as it was."""
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
    """Adopts `file`; `strict` refuses what would be a warning. The same call again returns at once."""
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
        if strict and values["warnings"]:
            raise DataError(f"tokenizer {path}", values["warnings"][0], "Leave out --strict to take it as it is.")
        return _report(out_dir, values)
    check_place(out_dir)

    backend = open_existing(path, data)
    warnings = _make_plain(backend)
    backend = _without_holes(backend, path)
    text_vocab_size = backend.get_vocab_size(with_added_tokens=True)
    wanted = place_special_tokens(backend.get_vocab(with_added_tokens=True), special_ids or {}, special_start)
    _add(backend, wanted, text_vocab_size)
    warnings += _losses(backend)
    for warning in warnings:
        if strict:
            raise DataError(f"tokenizer {path}", warning, "Leave out --strict to take it as it is.")
        say(f"warning: {path.name}: {warning}")
    extra_files = {MODEL_FILE: data} if path.suffix == ".model" else {}
    results = {"text_vocab_size": text_vocab_size, "warnings": warnings}
    write_folder(backend, out_dir, {**recipe, **results}, extra_files, safe_by_default)
    return _report(out_dir, read_recipe(out_dir, recipe))


def parse_special_ids(given: Sequence[str]) -> dict[str, int]:
    """`["<|PAD|>=64006"]` -> `{"<|PAD|>": 64006}`."""
    numbers: dict[str, int] = {}
    for one in given:
        name, _, number = one.rpartition("=")
        if not name or not number.isdecimal():
            raise ConfigError(f"special {one!r}", "not NAME=ID", "Write e.g. '<|PAD|>=64006', in quotes.")
        if numbers.get(name, int(number)) != int(number):
            raise ConfigError(f"special {one!r}", f"{name} was given id {numbers[name]} before", "Give it once.")
        numbers[name] = int(number)
    return numbers


def find_file(path: Path) -> Path:
    """The file itself, or the one in a folder: tokenizer.json, else the only .model."""
    fix = "Give a tokenizer.json, a Hugging Face folder, or a SentencePiece .model."
    if path.is_dir():
        found = [path / TOKENIZER_FILE] if (path / TOKENIZER_FILE).is_file() else sorted(path.glob("*.model"))
        if len(found) != 1:
            rule = f"it has neither {TOKENIZER_FILE} nor exactly one .model"
            raise DataError(f"folder {path}", rule, fix)
        return found[0]
    if not path.is_file():
        raise DataError(f"tokenizer {path}", "no such file", fix)
    return path


def place_special_tokens(vocabulary: Mapping[str, int], given: Mapping[str, int], start: int | None) -> dict[str, int]:
    """Numbers for all control tokens. One that the tokenizer has already keeps its number."""
    end = max(vocabulary.values(), default=-1) + 1
    if start is not None and start < end:
        rule = f"ids 0 to {end - 1} belong to the tokenizer's own tokens"
        raise ConfigError(f"special start {start}", rule, f"Start at {end} or later.")
    wanted: dict[str, int] = {}
    for place, name in enumerate(SPECIAL_TOKENS):
        if name in given:
            continue
        if name in vocabulary:
            wanted[name] = vocabulary[name]
        elif start is not None:
            wanted[name] = start + place
    for name, number in given.items():
        if vocabulary.get(name, number) != number:
            rule = f"the tokenizer has it already, as {vocabulary[name]}"
            raise ConfigError(f"special {name}={number}", rule, f"Write {name}={vocabulary[name]}, or leave it out.")
        if number < end and vocabulary.get(name) != number:
            rule = f"ids 0 to {end - 1} belong to the tokenizer's own tokens"
            raise ConfigError(f"special {name}={number}", rule, f"Choose {end} or more.")
        wanted[name] = number
    taken = {number: name for name, number in wanted.items()}
    if len(taken) != len(wanted):
        name, number = next((n, i) for n, i in wanted.items() if taken[i] != n)
        rule = f"{taken[number]} has that id, too"
        raise ConfigError(f"special {name}={number}", rule, "Give each its own.")
    free = (number for number in range(end, end + len(wanted) + len(SPECIAL_TOKENS)) if number not in taken)
    return {**wanted, **{name: next(free) for name in SPECIAL_TOKENS if name not in wanted}}


def open_existing(path: Path, data: bytes) -> Tokenizer:
    """The tokenizer in a file, as it is."""
    if path.suffix == ".model":
        return spm_to_backend(parse_spm_model(data, f"tokenizer {path}"), f"tokenizer {path}")
    try:
        return Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the Rust side raises bare Exception
        fix = "Give a tokenizer.json, a Hugging Face folder, or a SentencePiece .model."
        raise DataError(f"tokenizer {path}", f"not readable ({error})", fix) from None


def _make_plain(backend: Tokenizer) -> list[str]:
    """Nothing is cut off, filled up or added at the ends; control tokens are put in by whoever packs the text."""
    backend.no_truncation()
    backend.no_padding()
    added = [
        name for name in backend.encode("a").tokens if name not in backend.encode("a", add_special_tokens=False).tokens
    ]
    if not added:
        return []
    backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return [f"it put {' '.join(added)} around every text; this is left to the packing now"]


def _without_holes(backend: Tokenizer, path: Path) -> Tokenizer:
    """Ids that nothing has become reserved entries; new tokens are numbered by count and would meet old ones else."""
    taken = set(backend.get_vocab(with_added_tokens=True).values())
    holes = sorted(set(range(max(taken, default=-1) + 1)) - taken)
    if not holes:
        return backend
    rules: dict[str, Any] = json.loads(backend.to_str())
    if not isinstance(rules["model"]["vocab"], dict):
        raise DataError(f"tokenizer {path}", f"id {holes[0]} is missing", "Give a tokenizer without holes.")
    rules["model"]["vocab"] |= {reserved_name(number): number for number in holes}
    return Tokenizer.from_str(json.dumps(rules, ensure_ascii=False))


def reserved_name(number: int) -> str:
    return f"<|reserved_{number}|>"


def _add(backend: Tokenizer, wanted: Mapping[str, int], first: int) -> None:
    """`tokenizers` numbers added tokens one after the other, so all of them are added in order, gaps filled."""
    names = {number: name for name, number in wanted.items()}
    backend.add_special_tokens([control_token(names[number]) for number in sorted(names) if number < first])
    behind = range(first, max(first, max(names) + 1))
    backend.add_special_tokens([control_token(names.get(number, reserved_name(number))) for number in behind])
    for name, number in wanted.items():
        assert backend.token_to_id(name) == number, f"{name} is {backend.token_to_id(name)}, not {number}"


def _losses(backend: Tokenizer) -> list[str]:
    tokenizer = Z2allTokenizer(backend, "")
    found = []
    for text in PROBES:
        back = tokenizer.decode(tokenizer.encode(text))
        if back != text:
            found.append(f"text does not come back exactly: {text!r} becomes {back!r}")
            break
    unknown = tokenizer.encode("\U000f0000")  # what no text holds: a token for unknown characters, or bytes
    for name, number in tokenizer.special_tokens.items():
        if number not in unknown and number in tokenizer.encode(f"a {name} b") + tokenizer.encode(name):
            found.append(f"text that spells {name} becomes the control token {number}")
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
