"""Compares tokenizers: compression per domain, numbers, indentation, Chinese, round trips, and kinds of tokens."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from z2all_ds.base.reports import Shown, Table
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.tokenizer.import_existing import PROBES, find_file, open_existing
from z2all_ds.tokenizer.sampling import Inputs, open_sources
from z2all_ds.tokenizer.tokenization_z2all import byte_table

SAMPLE_BYTES_PER_DOMAIN = 2_000_000
NUMBERS = ("7", "42", "2024", "1234567890", "3.14159265", "2024-12-31", "12:30:59", "1,000,000")
INDENTATIONS = {
    "4 blanks": "x\n    y",
    "8 blanks": "x\n        y",
    "12 blanks": "x\n            y",
    "2 tabs": "x\n\t\ty",
    "a second line end": "x\n\ny",
}
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]+")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\U00020000-\U0003ffff]")
KINDS = ("CJK", "Latin", "digits", "whitespace", "signs", "other letters", "parts of characters", "control")


@dataclass(frozen=True)
class DomainFigures:
    """Compression of one domain."""

    bytes_per_token: float
    chars_per_token: float
    comes_back: bool
    """Every sampled document is reproduced exactly."""


@dataclass(frozen=True)
class TokenizerFigures:
    """Figures of one tokenizer; counts are tokens."""

    folder: str
    size: int
    domains: dict[str, DomainFigures]
    chinese_chars_per_token: float | None
    """For the runs of Han characters in all domains; None if there are none."""
    numbers: dict[str, int]
    indentation: dict[str, int]
    """Tokens between two letters."""
    comes_back: bool
    """All documents and all PROBES are reproduced exactly."""
    does_not_come_back: str
    """The beginning of the first text that is not; empty if all are."""
    composition: dict[str, int]


def report_tokenizers(
    folders: Sequence[str | Path], corpus: Inputs, sample_bytes: int = SAMPLE_BYTES_PER_DOMAIN
) -> list[TokenizerFigures]:
    """Measure each folder (or tokenizer.json, or .model) on the same sample of a corpus folder or files."""
    domains = open_sources(corpus).domains
    texts = {name: [text for _, text in domain.sample(sample_bytes)] for name, domain in domains.items()}
    return [measure(str(folder), texts) for folder in folders]


def measure(folder: str, texts: Mapping[str, list[str]]) -> TokenizerFigures:
    """Return the figures of one tokenizer; `texts` are by domain."""
    path = find_file(Path(folder))
    backend = open_existing(path, read_regular(path))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    domains, lost = {}, ""
    for name, some in texts.items():
        ids = _encode(backend, some)
        tokens = max(1, sum(map(len, ids)))
        backs = backend.decode_batch(ids, skip_special_tokens=False)
        changed = next((text for text, back in zip(some, backs, strict=True) if text != back), "")
        lost = lost or changed
        domains[name] = DomainFigures(
            bytes_per_token=round(sum(len(text.encode()) for text in some) / tokens, 4),
            chars_per_token=round(sum(map(len, some)) / tokens, 4),
            comes_back=not changed,
        )
    for probe, ids_of_probe in zip(PROBES, _encode(backend, list(PROBES)), strict=True):
        if not lost and backend.decode(ids_of_probe, skip_special_tokens=False) != probe:
            lost = probe
    han = [run for some in texts.values() for text in some for run in _HAN.findall(text)]
    ends = len(_encode(backend, ["x"])[0]) + len(_encode(backend, ["y"])[0])
    return TokenizerFigures(
        folder=folder,
        size=max(backend.get_vocab().values()) + 1,
        domains=domains,
        chinese_chars_per_token=round(sum(map(len, han)) / sum(map(len, _encode(backend, han))), 4) if han else None,
        numbers={text: len(ids) for text, ids in zip(NUMBERS, _encode(backend, list(NUMBERS)), strict=True)},
        indentation={name: max(0, len(_encode(backend, [text])[0]) - ends) for name, text in INDENTATIONS.items()},
        comes_back=not lost,
        does_not_come_back=lost[:80],
        composition=composition(backend),
    )


def composition(backend: Tokenizer) -> dict[str, int]:
    """Return the number of tokens of each kind."""
    table = byte_table(backend)
    special = {n for n, token in backend.get_added_tokens_decoder().items() if token.special}
    counts = Counter[str]()
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        if number in special:
            counts["control"] += 1
        else:
            counts[kind_of(table.bytes_of_id[number] if table else token.replace("\u2581", " ").encode())] += 1
    return {kind: counts[kind] for kind in KINDS}


def kind_of(data: bytes) -> str:
    """Return the kind of a token."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "parts of characters"
    if not text.strip():
        return "whitespace"
    if _CJK.search(text):
        return "CJK"
    if any(char.isalpha() for char in text):
        return "Latin" if any(char.isalpha() and ord(char) < 0x250 for char in text) else "other letters"
    return "digits" if any(char.isdigit() for char in text) else "signs"


def describe(figures: Sequence[TokenizerFigures]) -> Shown:
    """Yield a table with a column per tokenizer."""
    rows: list[list[str]] = [["ids", *(f"{one.size:,}" for one in figures)], []]
    for name in figures[0].domains:
        packed = [one.domains[name] for one in figures]
        rows.append([f"{name}: bytes per token", *(f"{one.bytes_per_token:.3f}" for one in packed)])
        rows.append([f"{name}: characters per token", *(f"{one.chars_per_token:.3f}" for one in packed)])
    chinese = [one.chinese_chars_per_token for one in figures]
    rows.append(["Chinese: characters per token", *("-" if rate is None else f"{rate:.3f}" for rate in chinese)])
    rows.append([])
    rows += [[f"tokens of {text}", *(str(one.numbers[text]) for one in figures)] for text in NUMBERS]
    rows.append([])
    for text in INDENTATIONS:
        rows.append([f"tokens of a line end and {text}", *(str(one.indentation[text]) for one in figures)])
    back = ("yes" if one.comes_back else f"no: {one.does_not_come_back!r}" for one in figures)
    rows += [["every text is reproduced", *back], []]
    rows += [[f"tokens that are {kind}", *(f"{one.composition[kind]:,}" for one in figures)] for kind in KINDS]
    yield Table(("", *(one.folder for one in figures)), rows)


def _encode(backend: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]
