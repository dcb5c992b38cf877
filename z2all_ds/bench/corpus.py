"""`z2all bench corpus`: what converting raw data costs here, form by form, on one core.

The same documents are written once in every form, then each file is converted by the real build in a process of its
own, from the first byte to the manifest. Beside it, in the same run, stands orjson parsing the lines of the JSON-lines
file and doing nothing with them: no conversion can be faster. Figures are per second of processor time, which a busy
machine disturbs less than the clock; the clock's are there too. Everything is measured several times, each time in a
new process, and the middle one counts.
"""

import gzip
import itertools
import json
import multiprocessing
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from z2all_ds.base.console import human_bytes, progress
from z2all_ds.base.errors import ConfigError
from z2all_ds.base.machine import one_thread_each
from z2all_ds.bench.memory import peak_memory_bytes
from z2all_ds.corpus import Executor, SourceSpec, build_corpus
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.converters import BuiltIn, find_converter

DEFAULT_MEGABYTES = 200
DEFAULT_REPEATS = 3
ROWS_PER_BATCH = 10_000
CLEANED = "jsonl, cleaned"
TEXT_STEPS = ["all", "exact_duplicates=off", "near_duplicates=off"]
"""Every step that looks at one document."""
SAMPLE_BYTES = 4_000_000
"""Of each built-in source; repeated with a number in front until there is enough."""


@dataclass(frozen=True)
class ConversionCost:
    """One form."""

    form: str
    raw_bytes: int
    """On disk."""
    text_bytes: int
    """Of the documents as JSON lines: the same for every form, so that forms can be compared."""
    documents: int
    cpu_seconds: float
    seconds: float
    text_mb_per_cpu_second: float
    text_mb_per_second: float
    peak_memory_bytes: int
    """Of the whole process, about 45 MB of which are Python and its libraries."""


@dataclass(frozen=True)
class CorpusCosts:
    """All forms, and the floor."""

    orjson_mb_per_cpu_second: float
    """Reading the JSON-lines file and parsing each line, nothing else."""
    jsonl_share_of_orjson: float
    forms: list[ConversionCost]
    text_mb_per_second_by_workers: dict[str, float]
    """JSON lines with the asked cleaning and numbers of worker processes, by the clock."""
    packages: dict[str, str]


def bench_corpus(
    megabytes: int = DEFAULT_MEGABYTES,
    only: Sequence[str] = (),
    workers: Sequence[int] = (),
    cleaning: Sequence[str] = (),
    repeats: int = DEFAULT_REPEATS,
) -> CorpusCosts:
    """Writes the files, converts each, and throws everything away.

    `only` names forms (all without). With `workers`, the JSON lines are converted with each number of processes, too,
    and there with the steps of `cleaning`.
    """
    names = [*WRITERS, CLEANED]
    wrong = [name for name in only if name not in names]
    if wrong:
        raise ConfigError(f"form {wrong[0]!r}", f"the forms are {'; '.join(names)}", "Leave it out for all of them.")
    if megabytes < 1:
        raise ConfigError(f"megabytes {megabytes}", "must be at least 1", f"Leave it at {DEFAULT_MEGABYTES}.")
    if repeats < 1:
        raise ConfigError(f"repeats {repeats}", "must be at least 1", f"Leave it at {DEFAULT_REPEATS}.")
    chosen = [name for name in names if name in (only or names)]
    rules, executors = CleaningRules.parse(list(cleaning)), [Executor(count) for count in workers]
    with tempfile.TemporaryDirectory(prefix="z2all-bench-") as scratch:
        folder = Path(scratch)
        lines = folder / "documents.jsonl"
        text_bytes, documents = _write_lines(lines, megabytes * 1_000_000)
        found, by_workers = [], {}
        with progress("bench corpus", len(chosen) + 1 + len(workers), "measurements") as advance:
            floor = _middle(repeats, "cpu_seconds", _parse_only, lines)["cpu_seconds"]
            advance(1)
            for name in chosen:
                raw = lines if name == CLEANED else _write_form(name, lines, folder)
                steps = CleaningRules.parse(TEXT_STEPS if name == CLEANED else [])
                cost = _middle(repeats, "cpu_seconds", _convert, (raw, folder / "corpus", steps, Executor(1)))
                rates = {
                    "text_mb_per_cpu_second": text_bytes / 1e6 / cost["cpu_seconds"],
                    "text_mb_per_second": text_bytes / 1e6 / cost["seconds"],
                }
                found.append(ConversionCost(name, raw.stat().st_size, text_bytes, documents, **cost, **rates))
                if raw != lines:
                    raw.unlink()
                advance(1, name)
            for executor in executors:
                cost = _middle(repeats, "seconds", _convert, (lines, folder / "corpus", rules, executor))
                by_workers[str(executor.workers)] = text_bytes / 1e6 / cost["seconds"]
                advance(1, f"{executor.workers} workers")
    floor_rate = text_bytes / 1e6 / floor
    jsonl = next((cost.text_mb_per_cpu_second for cost in found if cost.form == "jsonl"), 0.0)
    packages = {name: version(name) for name in ("orjson", "pyarrow", "numpy")}
    return CorpusCosts(floor_rate, jsonl / floor_rate, found, by_workers, packages)


def to_json(costs: CorpusCosts) -> str:
    return json.dumps(asdict(costs), indent=2)


def to_lines(costs: CorpusCosts) -> Iterator[str]:
    """For people."""
    yield f"orjson alone: {costs.orjson_mb_per_cpu_second:.0f} MB per second of one core"
    for cost in costs.forms:
        rates = f"{cost.text_mb_per_cpu_second:6.1f} MB/s per core, {cost.text_mb_per_second:.1f} by the clock"
        sizes = f"peak {human_bytes(cost.peak_memory_bytes)}, {human_bytes(cost.raw_bytes)} on disk"
        yield f"{cost.form:16} {rates}, {sizes}"
    for workers, rate in costs.text_mb_per_second_by_workers.items():
        yield f"{workers:>3} workers      {rate:6.1f} MB/s by the clock"


def _write_lines(path: Path, wanted_bytes: int) -> tuple[int, int]:
    """(bytes, documents)."""
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
    written = count = 0
    with open(path, "wb") as stream:
        for number, (title, content) in enumerate(itertools.cycle(documents)):
            row = {"id": number, "title": title, "url": f"https://example.org/{number}", "text": f"{number} {content}"}
            written += stream.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
            if written >= wanted_bytes:
                return written, count
    raise AssertionError("a cycle does not end")


# One writer a form: from the JSON lines, a piece at a time (all but Parquet).


def _copy_lines(lines: Path, out: Path) -> None:
    shutil.copyfile(lines, out)


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


WRITERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "jsonl": ("raw.jsonl", _copy_lines),
    "json_array": ("raw.json", _array),
    "parquet": ("raw.parquet", _parquet),
    "lines": ("raw.txt", _plain_lines),
    "jsonl.gz": ("raw.jsonl.gz", _gzipped),
    "jsonl.zst": ("raw.jsonl.zst", _zstandard),
    "jsonl.zip": ("raw.jsonl.zip", _zipped),
    "jsonl.tar.gz": ("raw.tar.gz", _tarred),
}


def _write_form(name: str, lines: Path, folder: Path) -> Path:
    file, write = WRITERS[name]
    write(lines, folder / file)
    return folder / file


Cost = dict[str, Any]


def _middle(repeats: int, by: str, work: Callable[[Any], Cost], argument: Any) -> Cost:
    """Of several measurements, each in a new process, so that peak memory is of this work alone."""
    found = []
    for _ in range(repeats):
        with one_thread_each(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(work, argument).result())
    return sorted(found, key=lambda cost: cost[by])[(repeats - 1) // 2]


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
    return {"cpu_seconds": cpu_seconds, "seconds": seconds, "peak_memory_bytes": peak_memory_bytes()}
