"""`z2all bench corpus`: what converting raw data costs here, form by form, on one core.

The same documents are written once in every form, then the real build converts each file in a process of its own, from
the first byte to the manifest. In the same run orjson parses the lines of the JSON-lines file and does nothing with
them: no conversion can be faster. Rates are per second of processor time, which a busy machine disturbs less than the
clock; those by the clock are there too. Everything is measured several times, and the middle one counts.
"""

import gzip
import itertools
import multiprocessing
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from z2all_ds.base.console import human_bytes, progress
from z2all_ds.base.machine import one_thread_each
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.shared import middle, require_at_least, require_known, scratch_folder
from z2all_ds.corpus import Executor, SourceSpec, build_corpus
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.converters import BuiltIn, find_converter

ROWS_PER_BATCH = 10_000
CLEANED = "jsonl, cleaned"
TEXT_STEPS = ["all", "exact_duplicates=off", "near_duplicates=off"]
"""Every step that looks at one document."""
SAMPLE_BYTES = 4_000_000
"""Of each built-in source; repeated with a number in front until there is enough."""


@dataclass(frozen=True)
class ConversionCost:
    """One form. `text_bytes` is the size of the documents as JSON lines: the same for every form."""

    form: str
    raw_bytes: int
    text_bytes: int
    documents: int
    cpu_seconds: float
    seconds: float
    text_mb_per_cpu_second: float
    text_mb_per_second: float
    peak_memory_bytes: int
    """Of the whole process, about 45 MB of which are Python and its libraries."""


@dataclass(frozen=True)
class CorpusCosts:
    """All forms, and the floor: orjson parsing each line of the JSON-lines file."""

    orjson_mb_per_cpu_second: float
    jsonl_share_of_orjson: float
    forms: list[ConversionCost]
    text_mb_per_second_by_workers: dict[str, float]
    """JSON lines with the asked cleaning and numbers of worker processes, by the clock."""
    packages: dict[str, str]


def bench_corpus(
    megabytes: int, only: Sequence[str], workers: Sequence[int], cleaning: Sequence[str], repeats: int
) -> CorpusCosts:
    """Writes the files, converts each, and deletes everything.

    `only` names forms (all without). With `workers`, the JSON lines are converted with each number of processes, too,
    and there with the steps of `cleaning`.
    """
    names = [*WRITERS, CLEANED]
    require_known("form", only, names)
    require_at_least(1, megabytes=megabytes, repeats=repeats)
    chosen = [name for name in names if name in (only or names)]
    rules, executors = CleaningRules.parse(list(cleaning)), [Executor(count) for count in workers]
    found, by_workers = [], {}
    with scratch_folder() as folder:
        lines = folder / "documents.jsonl"
        text_bytes, documents = _write_lines(lines, megabytes * 1_000_000)
        text_mb = text_bytes / 1e6
        with progress("bench corpus", len(chosen) + 1 + len(workers), "measurements") as advance:
            floor_rate = text_mb / _middle(repeats, "cpu_seconds", _parse_only, lines)["cpu_seconds"]
            advance(1)
            for name in chosen:
                raw = lines if name == CLEANED else folder / f"raw.{WRITERS[name][0]}"
                if raw != lines:
                    WRITERS[name][1](lines, raw)
                steps = CleaningRules.parse(TEXT_STEPS if name == CLEANED else [])
                cost = _middle(repeats, "cpu_seconds", _convert, (raw, folder / "corpus", steps, Executor(1)))
                cost["text_mb_per_cpu_second"] = text_mb / cost["cpu_seconds"]
                cost["text_mb_per_second"] = text_mb / cost["seconds"]
                found.append(ConversionCost(name, raw.stat().st_size, text_bytes, documents, **cost))
                if raw != lines:
                    raw.unlink()
                advance(1, name)
            for executor in executors:
                cost = _middle(repeats, "seconds", _convert, (lines, folder / "corpus", rules, executor))
                by_workers[str(executor.workers)] = text_mb / cost["seconds"]
                advance(1, f"{executor.workers} workers")
    jsonl = next((cost.text_mb_per_cpu_second for cost in found if cost.form == "jsonl"), 0.0)
    packages = {name: version(name) for name in ("orjson", "pyarrow", "numpy")}
    return CorpusCosts(floor_rate, jsonl / floor_rate, found, by_workers, packages)


def describe(costs: CorpusCosts) -> Shown:
    """Yields the rate of orjson alone, a table of forms, and a line for each number of workers."""
    yield f"orjson alone: {costs.orjson_mb_per_cpu_second:.0f} MB per second of one core"
    rows = []
    for cost in costs.forms:
        rates = (f"{cost.text_mb_per_cpu_second:.1f}", f"{cost.text_mb_per_second:.1f}")
        rows.append((cost.form, *rates, human_bytes(cost.peak_memory_bytes), human_bytes(cost.raw_bytes)))
    yield Table(("form", "MB/s per core", "MB/s by the clock", "peak memory", "on disk"), rows)
    for workers, rate in costs.text_mb_per_second_by_workers.items():
        yield f"{workers:>3} workers      {rate:6.1f} MB/s by the clock"


def _write_lines(path: Path, wanted_bytes: int) -> tuple[int, int]:
    """Writes the documents as JSON lines. Returns the bytes and the number of documents."""
    documents = []
    for name in ("chinese_sample", "python_docstrings", "python_code"):
        found = find_converter(name)
        assert isinstance(found, BuiltIn)
        size = 0
        for draft in found.generate(SAMPLE_BYTES):
            size += len(draft.content.encode())
            if size > SAMPLE_BYTES:
                break
            documents.append((draft.title, draft.content))
    written = 0
    with open(path, "wb") as stream:
        for number, (title, content) in enumerate(itertools.cycle(documents)):
            row = {"id": number, "title": title, "url": f"https://example.org/{number}", "text": f"{number} {content}"}
            written += stream.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            if written >= wanted_bytes:
                return written, number + 1
    raise AssertionError("a cycle does not end")


# One writer per form: from the JSON lines, a piece at a time (all but Parquet).


def _gzipped(lines: Path, out: Path) -> None:
    with open(lines, "rb") as source, gzip.open(out, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _zstandard(lines: Path, out: Path) -> None:
    import zstandard

    with open(lines, "rb") as source, open(out, "wb") as target:
        zstandard.ZstdCompressor().copy_stream(source, target)


def _zipped(lines: Path, out: Path) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(lines, "documents.jsonl")


def _tarred(lines: Path, out: Path) -> None:
    with tarfile.open(out, "w:gz") as archive:
        archive.add(lines, "documents.jsonl")


def _array(lines: Path, out: Path) -> None:
    with open(lines, "rb") as source, open(out, "wb") as target:
        target.write(b"[")
        for number, line in enumerate(source):
            target.write((b",\n" if number else b"") + line.rstrip(b"\n"))
        target.write(b"]")


def _parquet(lines: Path, out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.int64()), ("title", pa.string()), ("url", pa.string()), ("text", pa.string())])
    tables = []
    with open(lines, "rb") as source:
        while rows := [orjson.loads(line) for line in itertools.islice(source, ROWS_PER_BATCH)]:
            tables.append(pa.Table.from_pylist(rows, schema))
    table = pa.concat_tables(tables)
    # All in one row group, which is the hard case for the reader. The writer has to hold it.
    pq.write_table(table, out, row_group_size=table.num_rows)


def _plain_lines(lines: Path, out: Path) -> None:
    with open(lines, "rb") as source, open(out, "wb") as target:
        for line in source:
            target.write(orjson.loads(line)["text"].replace("\n", " ").encode() + b"\n")


WRITERS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "jsonl": ("jsonl", shutil.copyfile),
    "json_array": ("json", _array),
    "parquet": ("parquet", _parquet),
    "lines": ("txt", _plain_lines),
    "jsonl.gz": ("jsonl.gz", _gzipped),
    "jsonl.zst": ("jsonl.zst", _zstandard),
    "jsonl.zip": ("jsonl.zip", _zipped),
    "jsonl.tar.gz": ("tar.gz", _tarred),
}
"""Form -> ending of the file's name, writer."""

Cost = dict[str, Any]


def _middle(repeats: int, by: str, work: Callable[[Any], Cost], argument: Any) -> Cost:
    """Measures in a new process each time, so that peak memory is of this work alone."""
    found = []
    for _ in range(repeats):
        with one_thread_each(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(work, argument).result())
    return middle(found, by)


def _parse_only(lines: Path) -> Cost:
    started = time.process_time()
    with open(lines, "rb") as stream:
        for line in stream:
            orjson.loads(line)
    return {"cpu_seconds": time.process_time() - started}


def _convert(task: tuple[Path, Path, CleaningRules, Executor]) -> Cost:
    raw, out, rules, executor = task
    spec = SourceSpec("bench", "generic", (raw,), form="lines" if raw.suffix == ".txt" else "", cleaning=rules)
    started, cpu_started = time.perf_counter(), time.process_time()
    build_corpus(out, [spec], executor=executor)
    cpu_seconds, seconds = time.process_time() - cpu_started, time.perf_counter() - started
    shutil.rmtree(out)
    return {"cpu_seconds": cpu_seconds, "seconds": seconds, "peak_memory_bytes": peak_of_process()}
