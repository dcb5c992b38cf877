"""One unit of a build: some slices of raw data become a part, or several if it is a large file that cannot be cut.

Units are independent of each other, so they can run anywhere in any order. That holds for the numbers of documents,
too: every unit has a billion of its own, so that the second document of the fourth unit is 3000000001, however many
there are before it. Each unit is named by a hash of all it depends on; the summary is written last, and a unit with a
summary is never done again.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.base.atomic import explain_disk_errors, write_whole
from z2all_ds.base.errors import DataError
from z2all_ds.corpus.cleaning import Cleaner, CleaningReport, CleaningRules
from z2all_ds.corpus.compose import with_composed_content
from z2all_ds.corpus.converters import BuiltIn, Source, field_map_converter
from z2all_ds.corpus.converters.registry import ConvertRow
from z2all_ds.corpus.draft import Draft, RowRefused
from z2all_ds.corpus.faults import HARMLESS, Fault, FaultLog
from z2all_ds.corpus.forms import RowReader, Slice, open_slice
from z2all_ds.corpus.parts import SUFFIXES, Part, PartWriter
from z2all_ds.corpus.settings import SourceSpec, hashed
from z2all_ds.corpus.unit_progress import ProgressFile

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
    max_part_bytes: int
    first_id: int
    """Number of its first document in the source."""
    first_gid: int = 0
    """And in the corpus; known when the units of the domains before are counted."""

    @classmethod
    def of(cls, folder: Path, spec: SourceSpec, slices: Sequence[Slice], max_part_bytes: int, number: int) -> "Unit":
        parts = [*spec.output_key(), max_part_bytes]
        for piece in slices:
            # by path, size and time, as hashing terabytes takes long
            stat = os.stat(piece.path)
            parts += [sorted(asdict(piece).items()), stat.st_size, stat.st_mtime_ns]
        return cls(hashed(parts), str(folder), spec, tuple(slices), max_part_bytes, number * NUMBERS_PER_UNIT)

    @property
    def raw_bytes(self) -> int:
        """About what there is to do."""
        return sum(piece.raw_bytes for piece in self.slices) if self.slices else self.spec.max_bytes or 0

    def file(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.key}-{self.first_gid}-{self.first_id}.{suffix}"

    def part_path(self, number: int) -> Path:
        return self.file(f"{number}.lines")

    def is_finished(self) -> bool:
        return self.file("json").exists() and self.part_path(0).exists()

    def clear(self) -> None:
        """Removes all but the summary; done when the shards are made, to give the disk space back."""
        for number in itertools.count():
            path = self.part_path(number)
            if not path.exists():
                return
            for suffix in SUFFIXES:
                path.with_suffix(suffix).unlink(missing_ok=True)


@dataclass(frozen=True)
class UnitSummary:
    """What a finished unit holds."""

    parts: tuple[Part, ...]
    faults: FaultLog
    cleaning: CleaningReport

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @classmethod
    def read(cls, unit: Unit) -> "UnitSummary":
        values = json.loads(unit.file("json").read_bytes())
        # by number, not by path: the corpus may have been moved since
        parts = tuple(Part(str(unit.part_path(number)), *numbers) for number, numbers in enumerate(values["parts"]))
        faults = FaultLog("skip", 1.0, values["rows"], values["counts"], values["samples"])
        return cls(parts, faults, CleaningReport.from_json(values["cleaning"]))


def convert_unit(unit: Unit) -> UnitSummary:
    """Does the unit unless it is done."""
    if not unit.is_finished():
        with explain_disk_errors(Path(unit.folder)):
            _convert(unit)
    return UnitSummary.read(unit)


def _convert(unit: Unit) -> None:
    spec = unit.spec
    found = spec.found_converter()
    log, cleaner = spec.new_log(), Cleaner(spec.cleaning, found.is_code)
    with ExitStack() as stack:
        writer = PartWriter(
            unit.part_path, spec.domain, unit.first_gid, unit.first_id, spec.cleaning, unit.max_part_bytes
        )
        stack.enter_context(writer)
        report = stack.enter_context(ProgressFile(unit.file("progress"), lambda: writer.documents))
        drafts = _drafts_of(found, unit, writer, log, report)
        if spec.compose:
            drafts = with_composed_content(drafts, spec.compose)
        if spec.cleaning != CleaningRules():  # even a cleaner without rules counts bytes
            drafts = (kept for draft in drafts if (kept := cleaner.clean(draft)) is not None)
        writer.write(drafts)
        if writer.documents > NUMBERS_PER_UNIT:
            where = unit.slices[-1].path if unit.slices else spec.converter
            rule = f"more than {NUMBERS_PER_UNIT:,} documents in a file that cannot be read in pieces"
            raise DataError(where, rule, "Cut the file, or unpack it.")
        writer.finish()
    parts = [(part.first_id, part.documents, part.bytes, part.sha256) for part in writer.parts]
    values = {"parts": parts, **log.to_json(), "cleaning": cleaner.report.to_json()}
    write_whole(unit.file("json"), json.dumps(values, ensure_ascii=False))


def _drafts_of(
    found: Source | BuiltIn, unit: Unit, writer: PartWriter, log: FaultLog, report: ProgressFile
) -> Iterator[Draft]:
    if isinstance(found, BuiltIn):
        return _generated(found, unit.spec, writer)
    return _converted(found, unit, log, report)


def _generated(found: BuiltIn, spec: SourceSpec, writer: PartWriter) -> Iterator[Draft]:
    """Drafts of a built-in, until so many in a row go beyond the limit that it is full."""
    misses = 0
    for draft in found.generate(spec.max_bytes):
        before = writer.bytes
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
