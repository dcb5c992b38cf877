"""Samples text: a share of a byte budget per domain, with documents spread over the whole domain.

A domain comes from a corpus folder (its shards) or from plain files. A small domain is read completely, and the others
share the rest in proportion to their weights.
"""

import difflib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage import open_folder
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.manifest import Manifest, load_manifest
from z2all_ds.corpus.reading.readers import DomainReader, open_domains
from z2all_ds.corpus.reading.shards import check_content
from z2all_ds.corpus.schema import parse_record
from z2all_ds.tokenizer.text_files import TextPiece, file_pieces, file_sha256

PROGRESS_FROM_BYTES = 200_000_000
BLOCK_BYTES = 1 << 20
Inputs = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class SampledDomain:
    """The text of one domain."""

    bytes: int
    """Size on disk (including JSON), which is known without reading."""
    pieces: Callable[[], Iterator[TextPiece]]
    check_content: Callable[[], None] = lambda: None
    """Raises an error if the shards of a corpus differ from its manifest; reads them completely."""

    def sample(self, budget: int) -> Iterator[tuple[int, str]]:
        """Yield (bytes on disk, text) of about `budget` bytes, evenly spread from the first piece to the last.

        A piece is taken whenever the bytes taken are less than their share of the bytes seen; at least one is.
        """
        seen = taken = 0
        for size, read in self.pieces():
            if taken * self.bytes <= seen * budget and taken < budget:
                taken += size
                yield size, read()
            seen += size


@dataclass(frozen=True)
class Sources:
    """Domains of text, and a hash of all of it."""

    domains: dict[str, SampledDomain]
    fingerprint: str


def input_list(inputs: Inputs) -> list[str]:
    return [str(inputs)] if isinstance(inputs, str | Path) else [str(one) for one in inputs]


def open_sources(inputs: Inputs, with_fingerprint: bool = True) -> Sources:
    """Open a corpus folder, or files: each `PATH` (its name is the domain) or `NAME=PATH`; a name may be repeated.

    The fingerprint of files requires reading them once.
    """
    given = input_list(inputs)
    if not given:
        raise ConfigError("no input", "a sample needs text", "Give a corpus folder, files, or NAME=FILE.")
    if len(given) == 1 and "=" not in given[0] and not Path(given[0]).is_file():
        return _corpus_sources(given[0])
    return _file_sources(given, with_fingerprint)


def share_budget(
    available: Mapping[str, int], budget: int, weights: Mapping[str, float] | None = None
) -> dict[str, int]:
    """Return the bytes for each domain, in proportion to the weights (default: equal) and at most what it has."""
    exact = {name: Fraction(str(1 if weights is None else weights.get(name, 0))) for name in available}
    shares = dict.fromkeys((name for name in available if not exact[name]), 0)
    left, weight_left = budget, sum(exact.values())
    # The scarcest first, so that what it leaves is known when the others share the rest.
    for name in sorted((name for name in available if exact[name]), key=lambda n: (available[n] / exact[n], n)):
        shares[name] = min(available[name], int(left * exact[name] / weight_left))
        left, weight_left = left - shares[name], weight_left - exact[name]
    return shares


def parse_weights(text: str) -> dict[str, float]:
    """Parse `zh=0.5,en=0.3` or `{"zh": 0.5, "en": 0.3}`; does not check the domains."""
    try:
        if text.lstrip().startswith("{"):
            pairs = list(load_json(text).items())
        else:
            pairs = [tuple(part.rsplit("=", 1)) for part in text.split(",") if part.strip()]
        weights = {name.strip(): float(weight) for name, weight in pairs}
        if not weights:
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"weights {text!r}", "not NAME=NUMBER, separated by commas", "Try zh=0.5,en=0.5.") from None
    return weights


def check_weights(weights: Mapping[str, float], domains: Sequence[str]) -> None:
    for name, weight in weights.items():
        if name not in domains:
            near = difflib.get_close_matches(name, domains, n=1, cutoff=0.4)
            fix = f"Did you mean {near[0]!r}?" if near else "Use one of those names."
            raise ConfigError(f"weight of {name!r}", f"no such domain; there are {', '.join(domains)}", fix)
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"weight {name}={weight}", "must be zero or a positive number", "Try 0.5.")
    if not any(weights.values()):
        raise ConfigError(f"weights {dict(weights)}", "all are zero", "Give one of them more than 0.")


def _corpus_sources(location: str) -> Sources:
    folder, is_local = Path(location), "://" not in location
    manifest = load_manifest(location)
    readers = open_domains(location, manifest, "skip") if manifest.shards else {}
    by_line = bool(manifest.build_keys) and manifest.holds_records and is_local  # needs no index
    domains = {
        name: SampledDomain(
            readers[name].num_bytes,
            partial(_shard_pieces, folder, manifest, name) if by_line else partial(_text_pieces, readers[name]),
            partial(_check_shards, location, manifest, name),
        )
        for name in manifest.domains
        if name in readers
    }
    if not domains:
        raise DataError(f"corpus {location}", "it has no document", "Build it with at least one source.")
    return Sources(domains, manifest.fingerprint)


def _check_shards(location: str, manifest: Manifest, domain: str) -> None:
    for shard in manifest.shards:
        if shard.domain == domain:
            check_content(open_folder(location), shard)


def _text_pieces(reader: DomainReader) -> Iterator[TextPiece]:
    """Yield the documents of adopted files of any format."""
    for text in all_texts(reader):
        yield len(text.encode()), lambda text=text: text  # type: ignore[misc]


def all_texts(reader: DomainReader) -> Iterator[str]:
    """Yield the texts of a domain in order, read in blocks of about BLOCK_BYTES."""
    block_size = max(1, BLOCK_BYTES * reader.num_documents // max(1, reader.num_bytes))
    for first in range(0, reader.num_documents, block_size):
        end = min(first + block_size, reader.num_documents)
        yield from map(reader.open_block(first, end).text, range(end - first))


def text_batches(texts: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    """Group texts into lists of about this many characters, for one call of the tokenizer."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _shard_pieces(folder: Path, manifest: Manifest, domain: str) -> Iterator[TextPiece]:
    """Yield the records of a domain, which are parsed on request."""
    for shard in manifest.shards:
        if shard.domain != domain:
            continue
        try:
            with os.fdopen(open_regular(folder / shard.path), "rb") as stream:
                for number, line in enumerate(stream, 1):
                    where = f"{shard.path}:{number}"
                    yield len(line), lambda line=line, where=where: parse_record(line, where).content  # type: ignore[misc]
        except OSError as error:
            fix = "Restore the shard or build the corpus again."
            raise DataError(f"shard {folder / shard.path}", f"not readable ({error.strerror})", fix) from None


def _file_sources(given: list[str], with_fingerprint: bool) -> Sources:
    paths: dict[str, list[Path]] = {}
    for one in given:
        name, equals, rest = one.partition("=")
        path, domain = Path(rest), name
        if not equals or Path(one).exists():  # the path itself may contain "="
            path, domain = Path(one), Path(one).stem
        if not domain or not path.is_file():
            rule = "it is a folder; a corpus folder must be the only input" if path.is_dir() else "no such file"
            raise DataError(f"input {one!r}", rule, "Give a corpus folder, or files as PATH or NAME=PATH.")
        if not path.stat().st_size:
            raise DataError(f"file {path}", "it is empty", "Leave it out, or give a file with text.")
        paths.setdefault(domain, []).append(path)
    domains = {
        name: SampledDomain(
            sum(path.stat().st_size for path in some),
            lambda some=some: (piece for path in some for piece in file_pieces(path)),  # type: ignore[misc]
        )
        for name, some in sorted(paths.items())
    }
    total = sum(domain.bytes for domain in domains.values())
    return Sources(domains, _files_fingerprint(paths, total) if with_fingerprint else "")


def _files_fingerprint(paths: dict[str, list[Path]], total: int) -> str:
    """Return a hash of domain names and file contents; the location of a file does not matter."""
    parts = []
    bar = progress("hashing the files", total / 1e6, "MB")
    with bar if total >= PROGRESS_FROM_BYTES else nullcontext(lambda amount: None) as advance:
        for name, some in sorted(paths.items()):
            parts.append((name, [file_sha256(path) for path in some]))
            advance(sum(path.stat().st_size for path in some) / 1e6)
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()
