"""Units of a build: slices of raw data that become one part, or several for a large file that cannot be split.

Units are independent and can run anywhere in any order. Document numbers are independent too: every unit has a range of
a billion numbers, so the second document of the fourth unit always has the number 3000000001. A unit is named by a hash
of its inputs. Its summary is written last; a unit that has one is not converted again.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from z2all_ds.base.atomic import explain_disk_errors, write_whole
from z2all_ds.base.errors import DataError
from z2all_ds.base.json_text import load_json
from z2all_ds.corpus.building.parts import Part, PartWriter
from z2all_ds.corpus.building.settings import SourceSpec, short_hash
from z2all_ds.corpus.cleaning import Cleaner, CleaningReport, CleaningRules
from z2all_ds.corpus.converters import BuiltIn, Source, field_map_converter
from z2all_ds.corpus.converters.registry import ConvertRow
from z2all_ds.corpus.draft import Draft, RowRefused, compose
from z2all_ds.corpus.executors import progress_file
from z2all_ds.corpus.faults import HARMLESS, Fault, FaultLog
from z2all_ds.corpus.forms import Advance, RowReader, Slice, open_slice

IDS_PER_UNIT = 1_000_000_000
MISSES_BEFORE_FULL = 32
"""A domain with a size limit is full after this many documents in a row that do not fit; one may just be very long."""


@dataclass(frozen=True)
class Unit:
    """The input of one conversion task."""

    key: str
    """Hash of everything the documents depend on."""
    folder: str
    """Output folder."""
    spec: SourceSpec
    slices: tuple[Slice, ...]
    """Empty for a built-in converter."""
    max_part_bytes: int
    first_id: int
    """Number of its first document in the source."""
    first_gid: int = 0
    """Number of its first document in the corpus; set when the units of the preceding domains are known."""

    @classmethod
    def create(
        cls, folder: Path, spec: SourceSpec, slices: Sequence[Slice], max_part_bytes: int, number: int
    ) -> "Unit":
        inputs = [*spec.output_key(), max_part_bytes]
        for piece in slices:
            # Path, size and time identify a file; hashing terabytes would take too long.
            stat = os.stat(piece.path)
            inputs += [sorted(asdict(piece).items()), stat.st_size, stat.st_mtime_ns]
        return cls(short_hash(inputs), str(folder), spec, tuple(slices), max_part_bytes, number * IDS_PER_UNIT)

    @property
    def raw_bytes(self) -> int:
        """The approximate amount of work."""
        return sum(piece.raw_bytes for piece in self.slices) if self.slices else self.spec.max_bytes or 0

    def file(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.key}-{self.first_gid}-{self.first_id}.{suffix}"

    def part_path(self, number: int) -> Path:
        return self.file(f"{number}.lines")

    def is_finished(self) -> bool:
        return self.file("json").exists() and self.part_path(0).exists()


@dataclass(frozen=True)
class UnitSummary:
    """The parts and counts of a finished unit."""

    parts: tuple[Part, ...]
    faults: FaultLog
    cleaning: CleaningReport

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @classmethod
    def read(cls, unit: Unit) -> "UnitSummary":
        values = load_json(unit.file("json").read_bytes())
        # By number, not by path: the corpus may have been moved since.
        parts = tuple(Part(str(unit.part_path(number)), *numbers) for number, numbers in enumerate(values["parts"]))
        faults = FaultLog("skip", 1.0, values["rows"], values["counts"], values["samples"])
        return cls(parts, faults, CleaningReport.from_json(values["cleaning"]))


def convert_unit(unit: Unit) -> UnitSummary:
    """Convert the unit unless it is finished, and return its summary."""
    if not unit.is_finished():
        with explain_disk_errors(Path(unit.folder)):
            _convert(unit)
    return UnitSummary.read(unit)


def _convert(unit: Unit) -> None:
    spec = unit.spec
    converter = spec.load_converter()
    log, cleaner = spec.new_fault_log(), Cleaner(spec.cleaning, spec.is_code or converter.is_code)
    writer = PartWriter(unit.part_path, spec.domain, unit.first_gid, unit.first_id, spec.cleaning, unit.max_part_bytes)
    with writer, progress_file(unit.file("progress"), lambda: writer.documents) as advance:
        if isinstance(converter, BuiltIn):
            drafts = _generated(converter, spec.max_bytes, writer)
        else:
            drafts = _converted(converter, unit, log, advance)
        if spec.compose:
            drafts = _with_composed_content(drafts, spec.compose)
        if spec.cleaning != CleaningRules():  # even a cleaner without rules counts bytes
            drafts = (kept for draft in drafts if (kept := cleaner.clean(draft)) is not None)
        writer.write(drafts)
        if writer.documents > IDS_PER_UNIT:
            where = unit.slices[-1].path if unit.slices else spec.converter
            rule = f"more than {IDS_PER_UNIT:,} documents in a file that cannot be split"
            raise DataError(where, rule, "Split or decompress the file.")
        writer.finish()
    parts = [(part.first_id, part.documents, part.bytes, part.sha256) for part in writer.parts]
    values = {"parts": parts, **log.to_json(), "cleaning": cleaner.report.to_json()}
    write_whole(unit.file("json"), json.dumps(values, ensure_ascii=False))


def _generated(converter: BuiltIn, max_bytes: int | None, writer: PartWriter) -> Iterator[Draft]:
    """Yield the drafts of a built-in converter until the size limit is clearly exceeded.

    Some are too many; the final choice is made after duplicates are removed.
    """
    misses = 0
    for draft in converter.generate(max_bytes):
        before = writer.bytes
        yield draft
        if max_bytes is not None:
            misses = misses + 1 if before > max_bytes else 0
            if misses == MISSES_BEFORE_FULL:
                return


def _converted(converter: Source, unit: Unit, log: FaultLog, advance: Advance) -> Iterator[Draft]:
    spec = unit.spec
    convert = field_map_converter(dict(spec.fields)) if spec.fields else converter.convert
    for piece in unit.slices:
        with open_slice(piece, spec.limits, advance, Path(unit.folder)) as rows:
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
                raise RowRefused("title, content, category and desc must be strings")
        except RowRefused as error:
            log.add(Fault("columns", str(error)), rows.where)
        except (KeyError, TypeError, AttributeError) as error:
            log.add(Fault("columns", f"{type(error).__name__} {error} in {converter}"), rows.where)
        else:
            if content and not content.isspace():
                yield draft
            else:
                log.add(Fault("empty_text", "only whitespace"), rows.where)


def _with_composed_content(drafts: Iterator[Draft], template: str) -> Iterator[Draft]:
    for draft in drafts:
        draft.content = compose(draft, template)
        yield draft
