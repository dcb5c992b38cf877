"""One unit of a build: some slices of raw data become a part, a file of records as they will lie in a shard.

Units are independent of each other, so they can run anywhere in any order. That holds for the numbers of documents,
too: every unit has a billion of its own, so that the second document of the fourth unit is 3000000001, however many
there are before it. Each unit is named by a hash of all it depends on; the summary is written last, and a unit with a
summary is never done again. Beside the lines lie, one entry per document: their lengths, and where duplicates are
looked for, keys of their contents and MinHash signatures.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

import orjson

from z2all_ds.atomic import machine_limits_named, publish, temporary_name, write_whole
from z2all_ds.corpus.cleaning import Cleaner, CleaningReport, CleaningRules
from z2all_ds.corpus.cleaning.exact_duplicates import content_key
from z2all_ds.corpus.cleaning.near_duplicates import signature
from z2all_ds.corpus.compose import with_composed_content
from z2all_ds.corpus.converters import BuiltIn, Source, field_map_converter
from z2all_ds.corpus.converters.registry import ConvertRow
from z2all_ds.corpus.draft import Draft, RowRefused
from z2all_ds.corpus.faults import HARMLESS, Fault, FaultLog
from z2all_ds.corpus.forms import RowReader, Slice, open_slice
from z2all_ds.corpus.settings import SourceSpec, hashed
from z2all_ds.corpus.unit_progress import ProgressFile
from z2all_ds.errors import DataError

BLOCK_BYTES = 262_144
NUMBERS_PER_UNIT = 1_000_000_000
MISSES_BEFORE_FULL = 32
"""So many documents in a row that no longer fit end a limited domain; one giant among them must not."""


@dataclass(frozen=True)
class Unit:
    """The work of one task."""

    key: str
    """The same for the same documents."""
    folder: str
    """Where its files go."""
    spec: SourceSpec
    slices: tuple[Slice, ...]
    """Empty for a built-in converter."""
    first_id: int
    """Number of its first document in the source."""
    first_gid: int = 0
    """And in the corpus; known when the units of the domains before are counted."""

    @classmethod
    def of(cls, folder: Path, spec: SourceSpec, slices: Sequence[Slice], number: int) -> "Unit":
        parts = spec.output_key()
        for piece in slices:
            # by path, size and time, as hashing terabytes takes long
            stat = os.stat(piece.path)
            parts += [sorted(asdict(piece).items()), stat.st_size, stat.st_mtime_ns]
        return cls(hashed(parts), str(folder), spec, tuple(slices), number * NUMBERS_PER_UNIT)

    @property
    def raw_bytes(self) -> int:
        """About what there is to do."""
        return sum(piece.raw_bytes for piece in self.slices) if self.slices else self.spec.max_bytes or 0

    def file(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.key}-{self.first_gid}-{self.first_id}.{suffix}"

    def is_finished(self) -> bool:
        return self.file("json").exists() and self.file("lines").exists()

    def clear(self) -> None:
        """Removes all but the summary; done when the shards are written, to give the disk space back."""
        for suffix in ("lines", "lengths", "keys", "signatures"):
            self.file(suffix).unlink(missing_ok=True)


@dataclass(frozen=True)
class UnitSummary:
    """What a finished unit holds."""

    documents: int
    bytes: int
    sha256: str
    """Of the part."""
    faults: FaultLog
    cleaning: CleaningReport

    @classmethod
    def read(cls, unit: Unit) -> "UnitSummary":
        values = json.loads(unit.file("json").read_bytes())
        faults = FaultLog("skip", 1.0, values["rows"], values["counts"], values["samples"])
        cleaning = CleaningReport.from_json(values["cleaning"])
        return cls(values["documents"], values["bytes"], values["sha256"], faults, cleaning)


def convert_unit(unit: Unit) -> UnitSummary:
    """Does the unit unless it is done."""
    if not unit.is_finished():
        with machine_limits_named(Path(unit.folder)):
            _convert(unit)
    return UnitSummary.read(unit)


def _convert(unit: Unit) -> None:
    spec = unit.spec
    found = spec.found_converter()
    log, cleaner = spec.new_log(), Cleaner(spec.cleaning, found.is_code)
    with ExitStack() as stack:
        part = stack.enter_context(_PartWriter(unit))
        report = stack.enter_context(ProgressFile(unit.file("progress"), lambda: part.documents))
        drafts = _drafts_of(found, unit, part, log, report)
        if spec.compose:
            drafts = with_composed_content(drafts, spec.compose)
        if spec.cleaning != CleaningRules():  # even a cleaner without rules counts bytes
            drafts = (kept for draft in drafts if (kept := cleaner.clean(draft)) is not None)
        part.write(drafts)
        part.finish()
    values = {
        "documents": part.documents,
        "bytes": part.bytes,
        "sha256": part.sha256,
        **log.to_json(),
        "cleaning": cleaner.report.to_json(),
    }
    write_whole(unit.file("json"), json.dumps(values, ensure_ascii=False))


def _drafts_of(
    found: Source | BuiltIn, unit: Unit, part: "_PartWriter", log: FaultLog, report: ProgressFile
) -> Iterator[Draft]:
    if isinstance(found, BuiltIn):
        return _generated(found, unit.spec, part)
    return _converted(found, unit, log, report)


def _generated(found: BuiltIn, spec: SourceSpec, part: "_PartWriter") -> Iterator[Draft]:
    """Drafts of a built-in, until so many in a row go beyond the limit that it is full."""
    misses = 0
    for draft in found.generate(spec.max_bytes):
        before = part.bytes
        yield draft
        if spec.max_bytes is not None:
            # Rather some too many: which of them fit exactly is decided when duplicates are gone.
            misses = misses + 1 if before > spec.max_bytes else 0
            if misses == MISSES_BEFORE_FULL:
                return


def _converted(found: Source, unit: Unit, log: FaultLog, report: ProgressFile) -> Iterator[Draft]:
    spec = unit.spec
    convert = field_map_converter(dict(spec.fields)) if spec.fields else found.convert
    for piece in unit.slices:
        with open_slice(piece, spec.limits, report.advance, Path(unit.folder)) as rows:
            yield from _drafts(rows, convert, spec.converter, log)


def _drafts(rows: RowReader, convert: ConvertRow, converter: str, log: FaultLog) -> Iterator[Draft]:
    for row in rows:
        if isinstance(row, Fault):
            log.add(row, rows.where)
            log.rows += row.kind not in HARMLESS
            continue
        log.rows += 1
        try:
            draft = convert(row)
            content = draft.content
            if not type(content) is type(draft.title) is type(draft.category) is type(draft.desc) is str:
                raise RowRefused("title, content, category and desc must be texts")
        except RowRefused as error:
            log.add(Fault("columns", str(error)), rows.where)
        except (KeyError, TypeError, AttributeError) as error:
            log.add(Fault("columns", f"{type(error).__name__} {error} in {converter}"), rows.where)
        else:
            if content and not content.isspace():
                yield draft
            else:
                log.add(Fault("empty_text", "nothing but blanks"), rows.where)


class _PartWriter:
    """Lines into `.lines`, lengths, keys and signatures beside it; all renamed by `finish`, thrown away without it.

    Lines are gathered in one block of memory, used again and again: fresh memory for each costs more than the writing.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        rules = unit.spec.cleaning
        self._wants_keys, self._wants_signatures = rules.exact_duplicates, rules.near_duplicates is not None
        self._files = [unit.file("lines"), unit.file("lengths")]
        self._files += [unit.file("keys")] if self._wants_keys else []
        self._files += [unit.file("signatures")] if self._wants_signatures else []
        self._block, self._written_bytes = BytesIO(), 0
        self._lengths, self._digest = array("I"), hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    @property
    def documents(self) -> int:
        return len(self._lengths)

    @property
    def bytes(self) -> int:
        return self._written_bytes + self._block.tell()

    def __enter__(self) -> "_PartWriter":
        self._streams = {
            path.suffix: open(temporary_name(path), "wb")  # noqa: SIM115 - closed below
            for path in self._files
        }
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for path in self._files:
            temporary_name(path).unlink(missing_ok=True)
        for stream in self._streams.values():
            try:
                stream.close()
            except OSError:  # a full disk; the error that brought us here says so
                if kind is None:
                    raise

    def write(self, drafts: Iterable[Draft]) -> None:
        """One call for all of them: this loop is a part of what every document costs."""
        add_line, add_length, wants_extras = self._block.write, self._lengths.append, len(self._files) > 2
        gid, number, data_src = self._unit.first_gid, self._unit.first_id, self._unit.spec.domain
        block_bytes = 0
        for draft in drafts:
            size = add_line(record_line(gid, number, data_src, draft))
            add_length(size)
            gid += 1
            number += 1
            block_bytes += size
            if wants_extras:
                self._write_extras(draft.content)
            if block_bytes >= BLOCK_BYTES:
                self._write_block()
                block_bytes = 0
        self._write_block()

    def finish(self) -> None:
        self._lengths.tofile(self._streams[".lengths"])
        for path in self._files:
            stream = self._streams[path.suffix]
            stream.flush()
            os.fsync(stream.fileno())
            publish(temporary_name(path), path)

    def _write_extras(self, content: str) -> None:
        if self._wants_keys:
            self._streams[".keys"].write(content_key(content))
        if self._wants_signatures:
            self._streams[".signatures"].write(signature(content).tobytes())

    def _write_block(self) -> None:
        if self.documents > NUMBERS_PER_UNIT:
            rule = f"more than {NUMBERS_PER_UNIT:,} documents in a file that cannot be read in pieces"
            where = self._unit.slices[-1].path if self._unit.slices else self._unit.spec.converter
            raise DataError(where, rule, "Cut the file, or unpack it.")
        size = self._block.tell()
        with self._block.getbuffer()[:size] as data:
            self._streams[".lines"].write(data)
            self._digest.update(data)
        self._written_bytes += size
        self._block.seek(0)


def record_line(gid: int, number: int, data_src: str, draft: Draft) -> bytes:
    """The record as a line of JSON, with the line end."""
    values = {
        "gid": gid,
        "id": number,
        "data_src": data_src,
        "category": draft.category,
        "title": draft.title,
        "content": draft.content,
        "desc": draft.desc,
        "others": draft.others,
    }
    try:
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # whole numbers beyond 64 bits, which the standard library writes
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
