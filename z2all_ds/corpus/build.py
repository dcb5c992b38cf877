"""Builds a corpus: raw data to numbered records in shards, and a manifest at the very end.

    plan      each source's raw files are cut into units that can be worked on alone            (forms, units)
    convert   every unit becomes parts: files of numbered records, in processes or on Ray        (units, executors)
    select    duplicates and what is beyond the limit are marked, over all parts of a domain     (selection)
    shard     parts become shards of bounded size, most of them as they are                      (shards)
    publish   the shards are moved into the corpus, and the new manifest takes the old one's place

All before the last step happens in `.building` inside the corpus folder. Whatever is finished there is used again by
the next build, whether this one was stopped by an error, Ctrl-C or a power cut. The same sources give the same bytes,
however many workers there are.
"""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import (
    explain_disk_errors,
    force_to_disk,
    make_folder,
    publish,
    temporary_name,
    write_whole,
)
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.building import BUILDING_NAME, BuildingFolder, only_build
from z2all_ds.corpus.cleaning import CleaningReport
from z2all_ds.corpus.executors import Executor, Run
from z2all_ds.corpus.forms import Slice, expand_raw, plan_slices
from z2all_ds.corpus.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    load_records_manifest,
    write_manifest,
)
from z2all_ds.corpus.selection import KEYS_NAME, select
from z2all_ds.corpus.settings import MAX_SHARD_BYTES, SourceSpec, check_sources, hashed
from z2all_ds.corpus.shards import ShardTask, make_shard, plan_shards
from z2all_ds.corpus.unit_progress import UnitProgress
from z2all_ds.corpus.units import NUMBERS_PER_UNIT, Unit, UnitSummary, convert_unit

REPORTS_NAME = "reports"
HERE = Executor(workers=1)
UNITS_WANTED = 64
SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 16 * 2**20, 128 * 2**20


@dataclass(frozen=True)
class _Domain:
    """A source with its units."""

    spec: SourceSpec
    units: tuple[Unit, ...]
    key: str
    """Of all that its shards depend on, its first gid aside."""
    first_gid: int = 0

    def numbered(self, first_gid: int) -> "_Domain":
        """The same with its gids from there on."""
        units = tuple(dataclasses.replace(unit, first_gid=first_gid + unit.first_id) for unit in self.units)
        return dataclasses.replace(self, units=units, first_gid=first_gid)

    @property
    def next_gid(self) -> int:
        return self.first_gid + len(self.units) * NUMBERS_PER_UNIT


def build_corpus(
    out_dir: str | Path,
    sources: Sequence[SourceSpec],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    replace: bool = False,
    add: bool = False,
    executor: Executor = HERE,
) -> Manifest:
    """Builds the corpus, or returns at once the one that is there already from the same sources.

    With `add`, domains that are there and not named stay as they are. A domain that is there from other raw data or
    settings is not touched unless `replace` is set: a run may be reading it.
    """
    out_dir = Path(out_dir).absolute()
    check_sources(sources, max_shard_bytes)
    building = BuildingFolder(out_dir)
    domains = [_plan(spec, building, max_shard_bytes) for spec in sources]
    there = load_records_manifest(out_dir) if (out_dir / MANIFEST_NAME).exists() else Manifest(FORMAT_VERSION, ())
    wanted = {domain.spec.domain: domain.key for domain in domains}
    _refuse_to_overwrite(out_dir, there, wanted, replace, add)
    complete = {name for name, key in there.build_keys.items() if wanted.get(name) == key}
    complete -= {shard.domain for shard in there.shards if not _is_present(out_dir, shard)}
    stay = [s for s in there.shards if s.domain in complete or (add and s.domain not in wanted)]
    if len(complete) == len(domains) and len(stay) == len(there.shards) and not building.is_publishing():
        return there
    with explain_disk_errors(out_dir), only_build(make_folder(out_dir)), executor.opened() as run:
        building.open(there)
        next_gid = there.next_gid if stay else 0
        to_build = []
        for domain in domains:
            if domain.spec.domain not in complete:
                to_build.append(domain.numbered(next_gid))
                next_gid = to_build[-1].next_gid
        known_keys = [_keys_file(out_dir, name) for name in dict.fromkeys(shard.domain for shard in stay)]
        new = _build(to_build, building, there, known_keys, max_shard_bytes, run)
        manifest = Manifest(
            FORMAT_VERSION,
            _in_order(stay, new, list(wanted)),
            {**{name: key for name, key in there.build_keys.items() if any(s.domain == name for s in stay)}, **wanted},
            next_gid,
        )
        _publish(out_dir, building, there, manifest, new)
    return manifest


def _build(
    domains: Sequence[_Domain],
    building: BuildingFolder,
    there: Manifest,
    known_keys: Sequence[Path],
    max_shard_bytes: int,
    run: Run,
) -> list[ShardInfo]:
    """The shards of the domains, ready to be published."""
    finished: dict[str, list[ShardInfo]] = {}
    # Shard names that the old manifest lists are not used again: it stays true until the new one is there.
    taken: dict[str, set[str]] = {}
    for domain in domains:
        name = domain.spec.domain
        taken[name] = {s.path for s in there.shards if s.domain == name and there.build_keys.get(name) != domain.key}
        found = building.finished_shards(name, domain.key)
        if found is None:
            continue
        first_gid, shards = found
        if first_gid == domain.first_gid and not taken[name] & {shard.path for shard in shards}:
            finished[name] = shards
        else:  # with other numbers, or under names that are not free any more; its parts are gone, so from the start
            building.forget(name, domain.key)
    _convert([domain for domain in domains if domain.spec.domain not in finished], building, run)
    stages = []
    for domain in domains:
        name = domain.spec.domain
        if name not in finished:
            stages.append(_stage(domain, building, known_keys, max_shard_bytes, taken[name]))
        known_keys = [*known_keys, building.shards(name, domain.key) / KEYS_NAME]
    return [shard for shards in finished.values() for shard in shards] + _make_shards(stages, building, run)


def _in_order(stay: list[ShardInfo], new: list[ShardInfo], wanted: list[str]) -> tuple[ShardInfo, ...]:
    """First what was there and is not named, then the named domains in the order in which they are named."""
    place = {name: number for number, name in enumerate(wanted)}
    return tuple(sorted([*stay, *new], key=lambda shard: place.get(shard.domain, -1)))


def _plan(spec: SourceSpec, building: BuildingFolder, max_shard_bytes: int) -> _Domain:
    if not spec.raw:
        units: tuple[Unit, ...] = (Unit.of(building.units, spec, (), max_shard_bytes, 0),)
    else:
        form = spec.form or getattr(spec.found_converter(), "form", "auto")
        files = [path.absolute() for path in expand_raw(spec.raw)]
        # Small enough that every core has several, whatever machine it is; not so small that there are thousands.
        size = sum(path.stat().st_size for path in files) // UNITS_WANTED
        size = min(max(size, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
        slices = [piece for path in files for piece in plan_slices(path, form, size)]
        groups = enumerate(_grouped(slices, size))
        units = tuple(Unit.of(building.units, spec, group, max_shard_bytes, number) for number, group in groups)
    return _Domain(spec, units, hashed([[unit.key for unit in units], spec.max_bytes]))


def _grouped(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """Neighbours together up to `size`: a folder of a million small files must not become a million units."""
    groups: list[list[Slice]] = []
    room = 0
    for piece in slices:
        if not groups or piece.raw_bytes > room:
            groups.append([])
            room = size
        groups[-1].append(piece)
        room -= piece.raw_bytes
    return groups


def _refuse_to_overwrite(out_dir: Path, there: Manifest, wanted: dict[str, str], replace: bool, add: bool) -> None:
    names = {shard.domain for shard in there.shards}
    changed = sorted(name for name in names & wanted.keys() if there.build_keys.get(name) != wanted[name])
    unnamed = [] if add else sorted(names - wanted.keys())
    if (changed or unnamed) and not replace:
        what = f"domain {', '.join(changed or unnamed)} in {out_dir}"
        rule = (
            "it was built from other raw files or settings" if changed else "it is not among the sources of this build"
        )
        raise ConfigError(what, rule, "Choose another folder, or build with --replace to do away with it.")


def _is_present(out_dir: Path, shard: ShardInfo) -> bool:
    """By size only, as this runs at every start; the audit reads every byte."""
    path = out_dir / shard.path
    return path.is_file() and path.stat().st_size == shard.bytes


def _convert(domains: Sequence[_Domain], building: BuildingFolder, run: Run) -> None:
    """Converts the units that are not finished. Those of all domains together, so that no worker waits for a domain."""
    open_units = [unit for domain in domains for unit in domain.units if not unit.is_finished()]
    if not open_units:
        return
    raw_bytes = [unit.raw_bytes for unit in open_units]
    label = f"corpus {', '.join(dict.fromkeys(unit.spec.domain for unit in open_units))}"
    with progress(label, sum(raw_bytes), "bytes") as advance, UnitProgress(building.units, advance) as watch:
        for number, summary in run(convert_unit, open_units):
            watch.unit_finished(raw_bytes[number], summary.documents)


@dataclass(frozen=True)
class _Stage:
    """A domain on its way into shards."""

    domain: _Domain
    tasks: list[ShardTask]
    documents: int
    report: dict[str, Any]


def _stage(
    domain: _Domain,
    building: BuildingFolder,
    known_keys: Sequence[Path],
    max_shard_bytes: int,
    taken: set[str],
) -> _Stage:
    """Judges what was converted, selects what stays, and plans the shards."""
    spec = domain.spec
    faults, cleaning = spec.new_log(), CleaningReport()
    summaries = [UnitSummary.read(unit) for unit in domain.units]
    for summary in summaries:
        faults.merge(summary.faults)
        cleaning.merge(summary.cleaning)
    faults.judge(f"of domain {spec.domain}")
    folder = building.shards(spec.domain, domain.key)
    known_keys = [path for path in known_keys if path.exists()]
    parts, dropped = select(spec, [part for summary in summaries for part in summary.parts], folder, known_keys)
    documents = sum(len(part.kept()) for part in parts)
    if not documents:
        limit = "" if spec.max_bytes is None else f" of at most {spec.max_bytes} bytes"
        clean = sum(summary.documents for summary in summaries)
        rule = f"gave no document{limit} ({faults.rows} rows, {faults.bad} bad, {clean} clean)"
        raise DataError(f"source {spec.converter} of domain {spec.domain}", rule, "Check its files and settings.")
    generation = 1
    while any(path.startswith(f"{_prefix(spec.domain, generation)}-") for path in taken):
        generation += 1
    prefix = _prefix(spec.domain, generation)
    tasks = plan_shards(parts, folder, spec.domain, prefix, max_shard_bytes)
    building.claim(spec.domain, domain.key, {"first_gid": domain.first_gid, "prefix": prefix})
    report = {
        "domain": spec.domain,
        "converter": spec.converter,
        "raw_files": len({piece.path for unit in domain.units for piece in unit.slices}),
        "faults": faults.to_json(),
        "cleaning": cleaning.to_json(),
        "dropped": {step: asdict(what) for step, what in dropped.items()},
    }
    return _Stage(domain, tasks, documents, report)


def _make_shards(stages: Sequence[_Stage], building: BuildingFolder, run: Run) -> list[ShardInfo]:
    """The shards of all stages, in order; then the parts they were made of are removed."""
    tasks = [task for stage in stages for task in stage.tasks]
    found: dict[int, ShardInfo] = {}
    if tasks:
        with progress("shards", len(tasks), "shards") as advance:
            for number, shard in run(make_shard, tasks):
                found[number] = shard
                advance(1, shard.path)
    in_order = [found[number] for number in range(len(tasks))]
    for stage in stages:
        name = stage.domain.spec.domain
        shards = [shard for shard in in_order if shard.domain == name]
        sizes = {"documents": stage.documents, "bytes": sum(shard.bytes for shard in shards)}
        building.finish(name, stage.domain.key, stage.domain.first_gid, shards, {**stage.report, **sizes})
        for unit in stage.domain.units:
            unit.clear()
    return in_order


def _prefix(domain: str, generation: int) -> str:
    return domain if generation == 1 else f"{domain}.{generation}"


def _publish(
    out_dir: Path, building: BuildingFolder, there: Manifest, manifest: Manifest, new: Sequence[ShardInfo]
) -> None:
    """Moves the new shards in, lets the new manifest take the old one's place, then removes what it lists no more."""
    listed = {shard.path for shard in manifest.shards}
    building.announce(
        [(shard.path, shard.domain, manifest.build_keys[shard.domain]) for shard in new],
        [shard.path for shard in there.shards if shard.path not in listed],
    )
    (out_dir / REPORTS_NAME).mkdir(exist_ok=True)
    for shard in new:
        folder = building.shards(shard.domain, manifest.build_keys[shard.domain])
        (folder / shard.path).replace(out_dir / shard.path)
    for name in dict.fromkeys(shard.domain for shard in new):
        key = manifest.build_keys[name]
        report = building.report(name, key)
        write_whole(_report_file(out_dir, name), json.dumps(report, ensure_ascii=False, indent=1) + "\n")
        keys = building.shards(name, key) / KEYS_NAME
        if keys.exists():  # copied: if the build is stopped before the manifest, the next one needs them again
            temporary = temporary_name(_keys_file(out_dir, name))
            shutil.copyfile(keys, temporary)
            force_to_disk(temporary)
            publish(temporary, _keys_file(out_dir, name))
        else:
            _keys_file(out_dir, name).unlink(missing_ok=True)
    force_to_disk(out_dir)
    write_manifest(out_dir, manifest)
    for name in there.domains.keys() - manifest.domains.keys():
        _report_file(out_dir, name).unlink(missing_ok=True)
        _keys_file(out_dir, name).unlink(missing_ok=True)
    building.open(manifest)  # removes the shards that are not listed any more
    shutil.rmtree(out_dir / BUILDING_NAME)


def _report_file(out_dir: Path, domain: str) -> Path:
    return out_dir / REPORTS_NAME / f"{domain}.json"


def _keys_file(out_dir: Path, domain: str) -> Path:
    """Keys of a domain's documents, if its exact duplicates were looked for."""
    return out_dir / REPORTS_NAME / f"{domain}.keys"


def read_report(corpus_dir: str | Path, domain: str) -> dict[str, Any]:
    """What the build counted for a domain."""
    path = _report_file(Path(corpus_dir), domain)
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"not readable ({error})", "Build the domain again to get its report.") from None
    return values
