"""`z2all bench corpus`: the speed and memory of converting raw data, per format, on one core.

The same documents are written in every format, then the real build converts each file in a process of its own, from the
first byte to the manifest. For comparison orjson only parses the lines of the JSON-lines file: no conversion can be
faster. Rates are per second of CPU time, which depends less on other load than wall-clock time. Everything is measured
several times, and the median is reported.
"""

import gzip
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from z2all_ds.base.console import human_bytes, progress
from z2all_ds.base.machine import one_thread_each
from z2all_ds.base.process_memory import peak_of_process
from z2all_ds.base.reports import Shown, Table
from z2all_ds.bench.shared import (
    Report,
    built_in_text,
    in_new_process,
    median_repeat,
    repeated,
    require_at_least,
    require_known,
    sample_texts,
    scratch_folder,
)
from z2all_ds.corpus import Executor, SourceSpec, build_corpus
from z2all_ds.corpus.cleaning import CleaningRules

ROWS_PER_BATCH = 10_000
CLEANED = "jsonl, cleaned"
SINGLE_DOCUMENT_STEPS = ["all", "exact_duplicates=off", "near_duplicates=off"]
SAMPLE_BYTES = 12_000_000
"""Bytes of built-in text; the documents are repeated with a number in front until there is enough."""


def bench_corpus(
    megabytes: int, only: Sequence[str], workers: Sequence[int], cleaning: Sequence[str], repeats: int
) -> Report:
    """Write and convert each of the formats `only`, or all, in a temporary folder.

    With `workers`, the JSON lines are also converted with each of these numbers of processes and the steps `cleaning`;
    these rates are by wall-clock time. `text_bytes` is the size as JSON lines, the same for every format. The peak
    memory is that of the whole process, with about 45 MB for Python and its libraries.
    """
    names = [*WRITERS, CLEANED]
    require_known("form", only, names)
    require_at_least(1, megabytes=megabytes, repeats=repeats)
    chosen = [name for name in names if name in (only or names)]
    rules, executors = CleaningRules.parse(list(cleaning)), [Executor(count) for count in workers]
    found, by_workers = [], {}
    with scratch_folder() as folder:
        lines, out = folder / "documents.jsonl", folder / "corpus"
        texts = sample_texts(built_in_text(folder / "built_in", SAMPLE_BYTES), SAMPLE_BYTES)
        text_bytes, documents = _write_lines(lines, list(chain(*texts.values())), megabytes * 1_000_000)
        text_mb = text_bytes / 1e6
        with progress("bench corpus", len(chosen) + 1 + len(workers), "measurements") as advance:
            orjson_rate = text_mb / _median(repeats, "cpu_seconds", _parse_only, lines)["cpu_seconds"]
            advance(1)
            for name in chosen:
                raw, steps = lines, CleaningRules.parse(SINGLE_DOCUMENT_STEPS)
                if name != CLEANED:
                    raw, steps = folder / f"raw.{WRITERS[name][0]}", CleaningRules.parse([])
                    WRITERS[name][1](lines, raw)
                cost = _median(repeats, "cpu_seconds", _convert, raw, out, steps, Executor(1))
                sizes = {"raw_bytes": raw.stat().st_size, "text_bytes": text_bytes, "documents": documents}
                rate = {"text_mb_per_cpu_second": text_mb / cost["cpu_seconds"]}
                found.append({"form": name, **sizes, **cost, **rate})
                if raw != lines:
                    raw.unlink()
                advance(1, name)
            for executor in executors:
                cost = _median(repeats, "seconds", _convert, lines, out, rules, executor)
                by_workers[str(executor.workers)] = text_mb / cost["seconds"]
                advance(1, f"{executor.workers} workers")
    return {
        "orjson_mb_per_cpu_second": orjson_rate,
        "forms": found,
        "text_mb_per_second_by_workers": by_workers,
        "packages": {name: version(name) for name in ("orjson", "pyarrow", "numpy")},
    }


def describe(report: Report) -> Shown:
    """Yield the rate of orjson, a table of formats, and a line for each number of workers."""
    yield f"orjson only: {report['orjson_mb_per_cpu_second']:.0f} MB/s per core"
    rows = []
    for one in report["forms"]:
        sizes = (human_bytes(one["peak_memory_bytes"]), human_bytes(one["raw_bytes"]))
        rows.append((one["form"], f"{one['text_mb_per_cpu_second']:.1f}", *sizes))
    yield Table(("format", "MB/s per core", "peak memory", "on disk"), rows)
    for workers, rate in report["text_mb_per_second_by_workers"].items():
        yield f"{workers:>3} workers      {rate:6.1f} MB/s in total"


def _write_lines(path: Path, texts: list[str], wanted_bytes: int) -> tuple[int, int]:
    """Write the documents as JSON lines. Return the bytes and the number of documents."""
    written = 0
    with open(path, "wb") as stream:
        for number, text in enumerate(repeated(texts)):
            row = {"id": number, "title": f"document {number}", "url": f"https://example.org/{number}", "text": text}
            written += stream.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            if written >= wanted_bytes:
                return written, number + 1
    raise AssertionError("the texts are endless")


# One writer per format. All but Parquet's keep only a part of the documents in memory.


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
        while rows := [orjson.loads(line) for line in islice(source, ROWS_PER_BATCH)]:
            tables.append(pa.Table.from_pylist(rows, schema))
    table = pa.concat_tables(tables)
    # One row group for everything is the hardest case for the reader.
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
"""Format -> file name ending, writer."""


def _median(repeats: int, by: str, work: Callable[..., Report], *arguments: Any) -> Report:
    with one_thread_each():
        return median_repeat([in_new_process(work, *arguments) for _ in range(repeats)], by)


def _parse_only(lines: Path) -> Report:
    started = time.process_time()
    with open(lines, "rb") as stream:
        for line in stream:
            orjson.loads(line)
    return {"cpu_seconds": time.process_time() - started}


def _convert(raw: Path, out: Path, rules: CleaningRules, executor: Executor) -> Report:
    spec = SourceSpec("bench", "generic", (raw,), form="lines" if raw.suffix == ".txt" else "", cleaning=rules)
    started, cpu_started = time.perf_counter(), time.process_time()
    build_corpus(out, [spec], executor=executor)
    cpu_seconds, seconds = time.process_time() - cpu_started, time.perf_counter() - started
    shutil.rmtree(out)
    return {"cpu_seconds": cpu_seconds, "seconds": seconds, "peak_memory_bytes": peak_of_process()}
