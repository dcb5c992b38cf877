"""Texts to evaluate a model on, by domain: a corpus, or plain files.

A corpus yields some documents per domain, always the same ones: the first of a fixed shuffle. Plain files yield their
first documents: a .jsonl file (a string under `text` or `content` in each line) or .parquet file (such a column) is a
domain with its own name, a .txt file is one document, and all .txt files of a folder are a domain with its name.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.paths import expanded, full_path
from z2all_ds.corpus.faults import KINDS, Fault
from z2all_ds.corpus.forms import ReadLimits, Slice, open_slice
from z2all_ds.corpus.forms.plan import check_inside
from z2all_ds.corpus.manifest import MANIFEST_NAME, load_manifest
from z2all_ds.corpus.reading.readers import DomainReader, open_domains
from z2all_ds.data.order import permuted_index
from z2all_ds.tokenizer.text_files import TEXT_FIELDS, file_pieces

ORDER_SEED = 0
"""Seed of the shuffle."""
DOCUMENTS_OF_A_CORPUS = 50
"""Default number per domain."""
SUFFIXES = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class TextDomain:
    """Documents of one domain."""

    name: str
    read: Callable[[int, int], Iterator[str]]
    """From rank and number of ranks to its documents: number `rank`, `rank + ranks`, ...; all with (0, 1)."""
    num_documents: int | None
    """None if not counted."""


def open_texts(data: str | Path, documents: int | None, follow_links: bool = False) -> list[TextDomain]:
    """Open `documents` per domain, 0 for all; by default 50 of a corpus and all of plain files.

    Links inside a folder of plain files that lead out of it are refused unless `follow_links`.
    """
    if documents is not None and documents < 0:
        raise ConfigError(f"documents={documents}", "must be 0 (all) or above", "Use a larger number.")
    path = expanded(data)
    if path.is_file():
        return [_file_domain(path.stem, [path], documents or None)]
    if path.is_dir() and not (path / MANIFEST_NAME).is_file():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        for file in files:
            check_inside(file, None if follow_links else path)
        if files:
            return [_file_domain(name, paths, documents or None) for name, paths in _by_domain(path, files).items()]
    most = DOCUMENTS_OF_A_CORPUS if documents is None else documents
    return [_corpus_domain(reader, most) for reader in open_domains(data, load_manifest(data), "skip").values()]


def _corpus_domain(reader: DomainReader, most: int) -> TextDomain:
    count = min(most or reader.num_documents, reader.num_documents)
    return TextDomain(reader.name, partial(_shuffled, reader, count), count)


def _shuffled(reader: DomainReader, count: int, rank: int, ranks: int) -> Iterator[str]:
    for position in range(rank, count, ranks):
        yield reader.read(permuted_index(position, reader.num_documents, ORDER_SEED, 0, reader.name))


def _by_domain(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Group files: those with the same name, or in folders of the same name, are one domain."""
    domains: dict[str, list[Path]] = {}
    for file in files:
        source = file.parent if file.suffix == ".txt" else file.with_suffix("")
        name = full_path(folder).name if source == folder else source.relative_to(folder).as_posix()
        domains.setdefault(name, []).append(file)
    return domains


def _file_domain(name: str, files: list[Path], most: int | None) -> TextDomain:
    if files[0].suffix not in SUFFIXES:
        raise DataError(f"data {files[0]}", f"file type {files[0].suffix!r} unknown", f"Known: {', '.join(SUFFIXES)}.")
    return TextDomain(name, partial(_in_order, files, most), None)


def _in_order(files: list[Path], most: int | None, rank: int, ranks: int) -> Iterator[str]:
    most = None if most is None else min(most, sys.maxsize)
    return islice((text for file in files for text in _texts_of(file)), rank, most, ranks)


def _texts_of(file: Path) -> Iterator[str]:
    if file.suffix == ".jsonl":
        for _, read in file_pieces(file):
            yield read()
    elif file.suffix == ".parquet":
        yield from _parquet_texts(file)
    else:
        yield "".join(read() for _, read in file_pieces(file))


def _parquet_texts(file: Path) -> Iterator[str]:
    fix = "Use a Parquet file of texts."
    whole = Slice(str(file), "parquet", raw_bytes=file.stat().st_size)
    with open_slice(whole, ReadLimits(), lambda bytes_read: None) as rows:
        for row in rows:
            if isinstance(row, Fault):
                raise DataError(f"data {rows.where()}", f"{KINDS[row.kind]} ({row.detail})", fix)
            column = next((name for name in TEXT_FIELDS if name in row), None)
            if column is None:
                raise DataError(f"data {file}", f"no column {' or '.join(TEXT_FIELDS)}", fix)
            if not isinstance(row[column], str):
                raise DataError(f"data {rows.where()}", f"{column} holds {type(row[column]).__name__}, not text", fix)
            yield row[column]
