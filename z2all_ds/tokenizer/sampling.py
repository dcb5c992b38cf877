"""Streams a sample of text: each domain its share of a byte budget, and documents from all over each domain.

A domain comes from a corpus folder (its shards) or from plain files. What is small gives all it has, and the others
share what it leaves over, in proportion to their weights.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.manifest import Manifest, load_manifest
from z2all_ds.corpus.reading.readers import DomainReader, open_domains
from z2all_ds.corpus.schema import parse_record
from z2all_ds.tokenizer.text_files import TextPiece, file_pieces, file_sha256

HASH_BAR_FROM_BYTES = 200_000_000
DOCUMENTS_AT_A_TIME = 256


@dataclass(frozen=True)
class SampledDomain:
    """Text of one kind."""

    name: str
    bytes: int
    """As it lies on disk, JSON and all, since that is known without reading."""
    pieces: Callable[[], Iterator[TextPiece]]

    def sample(self, budget: int) -> Iterator[tuple[int, str]]:
        """(bytes on disk, text) of about `budget` bytes, evenly spread from the first piece to the last.

        A piece is taken whenever the bytes taken so far lag behind their due share of the bytes seen so far. At least
        one is given.
        """
        seen = taken = 0
        for size, read in self.pieces():
            if taken * self.bytes <= seen * budget and taken < budget:
                taken += size
                yield size, read()
            seen += size


@dataclass(frozen=True)
class Sources:
    """Where text comes from, and a hash of all of it."""

    domains: dict[str, SampledDomain]
    fingerprint: str
    label: str
    """For messages."""


def open_sources(inputs: str | Path | Sequence[str | Path], with_fingerprint: bool = True) -> Sources:
    """A corpus folder, or files: each `PATH` (its name is the domain) or `NAME=PATH`; one name may be given twice.

    The fingerprint of files costs reading them once.
    """
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not given:
        raise ConfigError("no input", "a sample needs text", "Give a corpus folder, files, or NAME=FILE.")
    if len(given) == 1 and "=" not in str(given[0]) and not Path(given[0]).is_file():
        return _corpus_sources(given[0])
    return _file_sources([str(one) for one in given], with_fingerprint)


def share_budget(
    available: Mapping[str, int], budget: int, weights: Mapping[str, float] | None = None
) -> dict[str, int]:
    """Bytes for each domain, in proportion to the weights (equal without); what a small one cannot use is shared on."""
    exact = {name: Fraction(str(1 if weights is None else weights.get(name, 0))) for name in available}
    shares = dict.fromkeys((name for name in available if not exact[name]), 0)
    left, weight_left = budget, sum(exact.values())
    # Scarcest first, so that what each leaves over is known when the others divide the rest.
    for name in sorted((name for name in available if exact[name]), key=lambda n: (available[n] / exact[n], n)):
        shares[name] = min(available[name], int(left * exact[name] / weight_left))
        left, weight_left = left - shares[name], weight_left - exact[name]
    return shares


def parse_weights(text: str) -> dict[str, float]:
    """`zh=0.5,en=0.3` or `{"zh": 0.5, "en": 0.3}`; which domains there are is checked later."""
    try:
        if text.lstrip().startswith("{"):
            pairs = list(json.loads(text).items())
        else:
            pairs = [tuple(part.rsplit("=", 1)) for part in text.split(",") if part.strip()]
        weights = {name.strip(): float(weight) for name, weight in pairs}
        if not weights:
            raise ValueError
    except (ValueError, TypeError):
        raise ConfigError(f"weights {text!r}", "not NAME=NUMBER, separated by commas", "Try zh=0.5,en=0.5.") from None
    return weights


def check_weights(weights: Mapping[str, float], domains: Sequence[str]) -> None:
    """Refuses weights that cannot be meant."""
    known = ", ".join(domains)
    for name, weight in weights.items():
        if name not in domains:
            near = difflib.get_close_matches(name, domains, n=1, cutoff=0.4)
            fix = f"Did you mean {near[0]!r}?" if near else "Use one of those names."
            raise ConfigError(f"weight of {name!r}", f"no such domain; there are {known}", fix)
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"weight {name}={weight}", "must be zero or a positive number", "Try 0.5.")
    if not any(weights.values()):
        raise ConfigError(
            f"weights {dict(weights)}", "all are zero, so no text is left", "Give one of them more than 0."
        )


def _corpus_sources(location: str | Path) -> Sources:
    folder, is_local = Path(location), "://" not in str(location)
    if is_local and folder.is_dir() and not any(folder.iterdir()):
        raise DataError(f"folder {folder}", "it is empty", "Give a corpus folder, files, or NAME=FILE.")
    manifest = load_manifest(location)
    readers = open_domains(location, manifest) if manifest.shards else {}
    own = manifest.holds_records and is_local  # read line by line: no index is needed for that
    domains = {
        name: SampledDomain(
            name,
            readers[name].num_bytes,
            partial(_shard_pieces, folder, manifest, name) if own else partial(_text_pieces, readers[name]),
        )
        for name in manifest.domains
        if name in readers
    }
    if not domains:
        raise DataError(f"corpus {location}", "it has no document", "Build it with at least one source.")
    return Sources(domains, manifest.fingerprint, f"corpus {location}")


def _text_pieces(reader: DomainReader) -> Iterator[TextPiece]:
    """Of adopted files, whatever their form."""
    for first in range(0, reader.num_documents, DOCUMENTS_AT_A_TIME):
        end = min(first + DOCUMENTS_AT_A_TIME, reader.num_documents)
        block = reader.open_block(first, end)
        for number in range(end - first):
            text = block.text(number)
            yield len(text.encode()), lambda text=text: text  # type: ignore[misc]


def _shard_pieces(folder: Path, manifest: Manifest, domain: str) -> Iterator[TextPiece]:
    for shard in manifest.shards:
        if shard.domain != domain:
            continue
        try:
            with open(folder / shard.path, "rb") as stream:
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
        # A path may hold a "=" of its own.
        path = Path(one) if not equals or Path(one).exists() else Path(rest)
        domain = name if equals and path != Path(one) else path.stem
        if not domain or not path.is_file():
            rule = "it is a folder; only one corpus folder can be given, alone" if path.is_dir() else "no such file"
            raise DataError(f"input {one!r}", rule, "Give a corpus folder, or files as PATH or NAME=PATH.")
        if not path.stat().st_size:
            raise DataError(f"file {path}", "it is empty", "Leave it out, or give a file with text.")
        paths.setdefault(domain, []).append(path)
    sizes = {name: sum(path.stat().st_size for path in some) for name, some in paths.items()}
    domains = {
        name: SampledDomain(name, sizes[name], lambda some=some: (p for path in some for p in file_pieces(path)))  # type: ignore[misc]
        for name, some in sorted(paths.items())
    }
    fingerprint = _files_fingerprint(paths, sum(sizes.values())) if with_fingerprint else ""
    return Sources(domains, fingerprint, "the files")


def _files_fingerprint(paths: dict[str, list[Path]], total: int) -> str:
    """Hash of names and contents: a moved file is the same text."""
    if total < HASH_BAR_FROM_BYTES:
        parts = [(name, [file_sha256(path) for path in some]) for name, some in sorted(paths.items())]
    else:
        parts = []
        with progress("hashing the files", total / 1e6, "MB") as advance:
            for name, some in sorted(paths.items()):
                parts.append((name, [file_sha256(path) for path in some]))
                advance(sum(path.stat().st_size for path in some) / 1e6)
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()
