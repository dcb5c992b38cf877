"""Documents, bytes, characters, tokens and document lengths of a corpus, by domain.

Lengths are stored as a count per length, so medians are exact and memory does not grow with the corpus. With a share
below 1, only some blocks of every shard are read; a document counts if it begins in one of them, so long and short ones
are equally likely, and the totals are scaled by bytes.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from z2all_ds.base.console import human_bytes, progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.base.outputs import check_plot, write_plot
from z2all_ds.base.reports import Shown, Table
from z2all_ds.base.storage.open_files import open_regular
from z2all_ds.corpus.executors import Executor
from z2all_ds.corpus.manifest import ShardInfo, load_records_manifest
from z2all_ds.corpus.schema import parse_record
from z2all_ds.tokenizer.sampling import text_batches
from z2all_ds.tokenizer.tokenization_z2all import load_tokenizer, worker_tokenizer

BLOCK_BYTES = 1 << 18
"""Unit of reading if only a share is read."""
BIN_EDGES = tuple(sorted({0, *(round(2 ** (half / 2)) for half in range(61))}))
"""Left edges of the histogram bins in characters, two per doubling."""
CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
             "Microsoft YaHei", "SimHei", "PingFang SC", "Hiragino Sans GB", "Arial Unicode MS")  # fmt: skip
TOTAL = "all"


@dataclass(frozen=True)
class DomainStats:
    """Figures of one domain. Lengths are in characters."""

    documents: int
    bytes: int
    """Size of the JSON, from the manifest."""
    content_bytes: int
    """Size of the texts in UTF-8; like all following figures an estimate if only a share was read."""
    characters: int
    tokens: int | None
    """Without control tokens; None without a tokenizer."""
    documents_read: int
    mean_length: float
    median_length: int
    p95_length: int
    max_length: int
    histogram: tuple[int, ...]
    """Number of documents read per bin of BIN_EDGES."""


@dataclass(frozen=True)
class CorpusStats:
    """Figures of a corpus."""

    domains: dict[str, DomainStats]
    total: DomainStats
    sample_share: float
    bin_edges: tuple[int, ...] = BIN_EDGES


@dataclass
class _Counts:
    """Figures of the part of some shards that was read."""

    bytes: int = 0
    content_bytes: int = 0
    tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, other: "_Counts") -> None:
        self.bytes += other.bytes
        self.content_bytes += other.content_bytes
        self.tokens += other.tokens
        self.lengths.update(other.lengths)


def corpus_stats(
    corpus_dir: str | Path, tokenizer_dir: str | Path | None = None, workers: int | None = 1, sample_share: float = 1.0
) -> CorpusStats:
    """Read the corpus, or about a share of it (at least one block per shard), in `workers` processes."""
    corpus_dir = Path(corpus_dir)
    if not 0 < sample_share <= 1:
        raise ConfigError(f"--sample {sample_share:g}", "must be above 0 and at most 1", "E.g. 0.01.")
    tokenizer = None if tokenizer_dir is None else (str(tokenizer_dir), load_tokenizer(tokenizer_dir).fingerprint)
    manifest = load_records_manifest(corpus_dir)
    counts: dict[str, _Counts] = {domain: _Counts() for domain in manifest.domains}
    with progress("stats", sum(shard.bytes for shard in manifest.shards), "bytes") as advance:
        work = partial(_count_shard, corpus_dir, tokenizer, sample_share)
        for number, found in Executor(workers).run(work, manifest.shards):
            counts[manifest.shards[number].domain].add(found)
            advance(manifest.shards[number].bytes)
    domains = {
        domain: _domain_stats(counts[domain], documents, size, tokenizer is not None)
        for domain, (documents, size) in manifest.domains.items()
    }
    return CorpusStats(domains, _total(list(domains.values()), list(counts.values())), sample_share)


def describe(stats: CorpusStats) -> Shown:
    """Yield a table with a row per domain."""
    tokens = ["tokens"] if stats.total.tokens is not None else []
    rows = []
    for name, one in [*stats.domains.items(), *([(TOTAL, stats.total)] if len(stats.domains) > 1 else [])]:
        sizes = [f"{one.documents:,}", human_bytes(one.bytes), human_bytes(one.content_bytes)]
        counts: list[float] = [one.characters, *([one.tokens] if one.tokens is not None else [])]
        counts += [one.mean_length, one.median_length, one.p95_length, one.max_length]
        rows.append([name, *sizes, *map(human_count, counts)])
    names = ("domain", "documents", "JSON", "content", "chars", *tokens, "mean", "median", "p95", "longest")
    yield Table(names, rows)
    if stats.sample_share != 1:
        yield f"estimated from {stats.total.documents_read:,} documents"


def human_count(count: float) -> str:
    """31520000 -> '31.5M'."""
    for unit in ("", "K", "M", "G"):
        if round(count, 1) < 1000:
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f}T"


def draw_lengths(stats: CorpusStats, out: Path) -> Path:
    """Plot the document lengths of each domain to a PNG or SVG file; return its path."""
    check_plot(out, "--plot")
    from matplotlib import font_manager, rc_context

    # Not pyplot, which would look for a display and keep the figure in memory.
    from matplotlib.figure import Figure

    installed = {font.name for font in font_manager.fontManager.ttflist}
    chinese = [name for name in CJK_FONTS if name in installed][:1]
    with rc_context({"font.family": ["DejaVu Sans", *chinese]}):
        figure = Figure(figsize=(8, 4.5), dpi=120)
        axes = figure.subplots()
        edges = np.array((*BIN_EDGES[1:], BIN_EDGES[-1] * 2))
        for domain, one in stats.domains.items():
            shares = 100 * np.array(one.histogram[1:]) / max(1, one.documents_read)
            axes.stairs(shares, edges, linewidth=1.5, label=_drawable(domain, bool(chinese)))
        seen = [number for one in stats.domains.values() for number, count in enumerate(one.histogram[1:]) if count]
        axes.set(xscale="log", xlabel="characters of the content", ylabel="% of documents")
        if seen:
            axes.set_xlim(edges[max(0, min(seen) - 1)], edges[min(len(edges) - 1, max(seen) + 2)])
            axes.legend()
        axes.grid(alpha=0.3)
        figure.tight_layout()
        return write_plot(figure, out, "--plot")


def _drawable(name: str, with_chinese: bool) -> str:
    """Escape a name for matplotlib, which parses $...$, hides names that start with _, and lacks most scripts."""
    name = name if with_chinese else name.encode("ascii", "backslashreplace").decode()
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _count_shard(corpus_dir: Path, tokenizer: tuple[str, str] | None, share: float, shard: ShardInfo) -> _Counts:
    """Count a shard, in a worker process; `tokenizer` is its folder and fingerprint."""
    counts = _Counts()

    def contents() -> Iterator[str]:
        for start, line in _chosen_lines(corpus_dir, shard, share):
            content = parse_record(line, f"{shard.path}, byte {start}").content
            counts.bytes += len(line)
            counts.content_bytes += len(content.encode("utf-8", "surrogatepass"))
            counts.lengths[len(content)] += 1
            yield content

    for texts in text_batches(contents()):
        if tokenizer is not None:
            counts.tokens += sum(map(len, worker_tokenizer(*tokenizer).encode_batch(texts)))
    return counts


def _chosen_lines(corpus_dir: Path, shard: ShardInfo, share: float) -> Iterator[tuple[int, bytes]]:
    """Yield (first byte, line) of the documents that begin in the chosen blocks of a shard."""
    try:
        stream = os.fdopen(open_regular(corpus_dir / shard.path), "rb")
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        rule = f"{why}, but the manifest lists it"
        raise DataError(f"{corpus_dir / shard.path}", rule, "Restore it, or build the corpus again.") from None
    with stream:
        for first, stop in _blocks(shard, share):
            # Start at the byte before: if it ends a line, the first document begins with the block.
            stream.seek(max(0, first - 1))
            start = first - 1 + len(stream.readline()) if first else 0
            while start < stop:
                line = stream.readline()
                if not line:
                    break
                yield start, line
                start += len(line)


def _blocks(shard: ShardInfo, share: float) -> list[tuple[int, int]]:
    """Return (first byte, end) of evenly spaced blocks, with a different start in each shard."""
    if share == 1:
        return [(0, shard.bytes)]
    count = max(1, -(-shard.bytes // BLOCK_BYTES))
    wanted = max(1, round(count * share))
    phase = int.from_bytes(hashlib.sha256(shard.path.encode()).digest()[:4], "big") / 2**32
    numbers = sorted({int((number + phase) * count / wanted) for number in range(wanted)})
    return [(number * BLOCK_BYTES, min(shard.bytes, (number + 1) * BLOCK_BYTES)) for number in numbers]


def _domain_stats(counts: _Counts, documents: int, size: int, with_tokens: bool) -> DomainStats:
    lengths = np.array(sorted(counts.lengths), dtype=np.int64)
    numbers = np.array([counts.lengths[length] for length in lengths.tolist()], dtype=np.int64)
    read, characters = int(numbers.sum()), int(lengths @ numbers)
    scale = size / counts.bytes if counts.bytes else 0.0
    histogram, _ = np.histogram(lengths, bins=[*BIN_EDGES, np.inf], weights=numbers)
    return DomainStats(
        documents=documents,
        bytes=size,
        content_bytes=round(counts.content_bytes * scale),
        characters=round(characters * scale),
        tokens=round(counts.tokens * scale) if with_tokens else None,
        documents_read=read,
        mean_length=characters / read if read else 0.0,
        median_length=_quantile(lengths, numbers, 0.5),
        p95_length=_quantile(lengths, numbers, 0.95),
        max_length=int(lengths[-1]) if read else 0,
        histogram=tuple(int(n) for n in histogram),
    )


def _quantile(lengths: np.ndarray, numbers: np.ndarray, share: float) -> int:
    """Return the smallest length that at least this share of the documents does not exceed."""
    if not len(lengths):
        return 0
    cumulative = np.cumsum(numbers)
    return int(lengths[np.searchsorted(cumulative, share * cumulative[-1])])


def _total(domains: list[DomainStats], counts: list[_Counts]) -> DomainStats:
    """Return the figures of all domains; of each, about the same share was read."""
    merged = _Counts()
    for one in counts:
        merged.add(one)
    with_tokens = any(one.tokens is not None for one in domains)
    size, documents = sum(one.bytes for one in domains), sum(one.documents for one in domains)
    total = asdict(_domain_stats(merged, documents, size, with_tokens))
    # The sums of the domains, so that the table adds up.
    for name in ("content_bytes", "characters", *(["tokens"] if with_tokens else [])):
        total[name] = sum(getattr(one, name) for one in domains)
    return DomainStats(**total)
