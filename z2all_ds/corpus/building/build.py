"""Builds a corpus: converts raw data to numbered records in shards, and writes the manifest last.

    plan      split the raw files of each source into independent units                          (forms, units)
    convert   turn every unit into parts, files of numbered records, in processes or on Ray      (units, executors)
    select    mark duplicates and documents beyond the size limit, over all parts of a domain    (selection)
    shard     make shards of bounded size from the parts, mostly without copying                 (shards)
    publish   move the shards into the corpus folder and replace the manifest

Everything before the last step happens in `.building` inside the corpus folder. A build that was stopped by an error,
Ctrl-C or a power failure continues from there. The same sources give the same bytes for any number of workers.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from z2all_ds.base.atomic import explain_disk_errors, force_to_disk, make_folder, publish, write_whole
from z2all_ds.base.console import progress
from z2all_ds.base.errors import ConfigError, DataError
from z2all_ds.corpus.building.folder import BuildingFolder, build_lock, refuse_link
from z2all_ds.corpus.building.report import REPORTS_NAME, is_report, keys_file, report_file
from z2all_ds.corpus.building.selection import KEYS_NAME, select
from z2all_ds.corpus.building.settings import MAX_SHARD_BYTES, SourceSpec, check_sources, short_hash
from z2all_ds.corpus.building.shards import ShardTask, make_shard, plan_shards
from z2all_ds.corpus.building.units import IDS_PER_UNIT, Unit, UnitSummary, convert_unit
from z2all_ds.corpus.cleaning import CleaningReport
from z2all_ds.corpus.executors import Executor, Run, run_all, task_progress
from z2all_ds.corpus.forms import Slice, expand_raw, plan_slices
from z2all_ds.corpus.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    load_records_manifest,
    write_manifest,
)

IN_THIS_PROCESS = Executor(workers=1)
UNITS_WANTED = 64
SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 16 * 2**20, 128 * 2**20


@dataclass(frozen=True)
class _Domain:
    """A source and its units."""

    spec: SourceSpec
    units: tuple[Unit, ...]
    key: str
    """Hash of everything its shards depend on, except the first gid."""
    first_gid: int = 0

    @property
    def name(self) -> str:
        return self.spec.domain

    def numbered_from(self, first_gid: int) -> "_Domain":
        units = tuple(dataclasses.replace(unit, first_gid=first_gid + unit.first_id) for unit in self.units)
        return dataclasses.replace(self, units=units, first_gid=first_gid)

    @property
    def next_gid(self) -> int:
        return self.first_gid + len(self.units) * IDS_PER_UNIT

    @property
    def shards_key(self) -> str:
        return f"{self.key}-{self.first_gid}"


@dataclass(frozen=True)
class _Selected:
    """A converted domain with its planned shards and its report."""

    domain: _Domain
    folder: Path
    """Folder for the shards inside `.building`."""
    tasks: list[ShardTask]
    report: dict[str, Any]


def build_corpus(
    out_dir: str | Path,
    sources: Sequence[SourceSpec],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    replace: bool = False,
    add: bool = False,
    executor: Executor = IN_THIS_PROCESS,
) -> Manifest:
    """Build the corpus and return its manifest; return at once if it was built from the same sources before.

    With `add`, existing domains that are not named are kept. An existing domain that was built from other raw data or
    settings is only overwritten with `replace`, because a run may be reading it.
    """
    out_dir = Path(out_dir).absolute()
    check_sources(sources, max_shard_bytes)
    building = BuildingFolder(out_dir)
    domains = [_plan(spec, building, max_shard_bytes) for spec in sources]
    old = load_records_manifest(out_dir) if (out_dir / MANIFEST_NAME).exists() else Manifest(FORMAT_VERSION, ())
    keys = {domain.name: domain.key for domain in domains}
    _refuse_to_overwrite(out_dir, old, keys, replace, add)
    complete = {name for name, key in old.build_keys.items() if keys.get(name) == key}
    complete -= {shard.domain for shard in old.shards if not shard.is_present(out_dir)}
    kept = [shard for shard in old.shards if shard.domain in complete or (add and shard.domain not in keys)]
    if len(complete) == len(domains) and len(kept) == len(old.shards) and not building.is_publishing():
        return old
    if not building.is_publishing():  # else files that the manifest does not list may be of the interrupted build
        _refuse_unlisted(out_dir, old, [domain for domain in domains if domain.name not in complete])
    with explain_disk_errors(out_dir), build_lock(make_folder(out_dir)), executor.opened() as run:
        building.recover(old)
        next_gid = old.next_gid if kept else 0
        to_build = []
        for domain in domains:
            if domain.name not in complete:
                to_build.append(domain.numbered_from(next_gid))
                next_gid = to_build[-1].next_gid
        _convert(to_build, building, run)
        known_keys = [keys_file(out_dir, name) for name in dict.fromkeys(shard.domain for shard in kept)]
        selected = []
        for domain in to_build:
            selected.append(_select(domain, building, old, known_keys, max_shard_bytes))
            known_keys.append(selected[-1].folder / KEYS_NAME)
        tasks = [task for one in selected for task in one.tasks]
        new = run_all(run, make_shard, tasks, "shards", [1] * len(tasks), "shards") if tasks else []
        # Unnamed domains first, then the named ones in their order.
        order = {name: number for number, name in enumerate(keys)}
        shards = tuple(sorted([*kept, *new], key=lambda shard: order.get(shard.domain, -1)))
        kept_keys = {shard.domain: old.build_keys[shard.domain] for shard in kept if shard.domain in old.build_keys}
        manifest = Manifest(FORMAT_VERSION, shards, {**kept_keys, **keys}, next_gid)
        _publish(out_dir, building, old, manifest, selected, new)
    return manifest


def _plan(spec: SourceSpec, building: BuildingFolder, max_shard_bytes: int) -> _Domain:
    groups: list[list[Slice]] = [[]]  # a built-in converter has one unit without raw data
    if spec.raw:
        form = spec.form or getattr(spec.load_converter(), "form", "auto")
        files = [path.absolute() for path in expand_raw(spec.raw, spec.follow_links)]
        # Several units per core on any machine, but not thousands.
        size = sum(path.stat().st_size for path in files) // UNITS_WANTED
        size = min(max(size, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
        groups = _grouped([piece for path in files for piece in plan_slices(path, form, size)], size)
    units = tuple(
        Unit.create(building.units, spec, group, max_shard_bytes, number) for number, group in enumerate(groups)
    )
    return _Domain(spec, units, short_hash([[unit.key for unit in units], spec.max_bytes]))


def _grouped(slices: Sequence[Slice], size: int) -> list[list[Slice]]:
    """Group neighbours up to `size` bytes, so that a million small files do not become a million units."""
    groups: list[list[Slice]] = []
    room = 0
    for piece in slices:
        if not groups or piece.raw_bytes > room:
            groups.append([])
            room = size
        groups[-1].append(piece)
        room -= piece.raw_bytes
    return groups


def _refuse_to_overwrite(out_dir: Path, old: Manifest, keys: dict[str, str], replace: bool, add: bool) -> None:
    names = {shard.domain for shard in old.shards}
    changed = sorted(name for name in names & keys.keys() if old.build_keys.get(name) != keys[name])
    unnamed = [] if add else sorted(names - keys.keys())
    if (changed or unnamed) and not replace:
        rule = "was built from other raw files or settings" if changed else "is not among the sources of this build"
        fix = "Choose another folder, or give --replace to overwrite it."
        raise ConfigError(f"domain {', '.join(changed or unnamed)} in {out_dir}", rule, fix)


def _refuse_unlisted(out_dir: Path, old: Manifest, domains: Sequence[_Domain]) -> None:
    """Refuse files of the user that have names of the files to publish."""
    refuse_link(out_dir / REPORTS_NAME, "the place of reports")
    listed = {shard.path for shard in old.shards}
    found = []
    for domain in domains:
        shard_name = re.compile(rf"{re.escape(_shard_prefix(domain, old))}-\d{{5,}}\.jsonl")
        found += [path for path in out_dir.glob("*.jsonl") if shard_name.fullmatch(path.name)]
        report, keys = report_file(out_dir, domain.name), keys_file(out_dir, domain.name)
        if domain.name not in old.build_keys and not is_report(report, domain.name):  # else left by a build
            found += [path for path in (report, keys) if path.exists() or path.is_symlink()]
    foreign = sorted(path for path in found if path.name not in listed)
    if foreign:
        fix = "Move it elsewhere, or choose another folder."
        raise ConfigError(f"file {foreign[0]}", "is not of this corpus, but the build would replace it", fix)


def _convert(domains: Sequence[_Domain], building: BuildingFolder, run: Run) -> None:
    """Convert the unfinished units of all domains together, so that no worker waits for a domain."""
    units = [unit for domain in domains for unit in domain.units if not unit.is_finished()]
    if not units:
        return
    label = f"corpus {', '.join(dict.fromkeys(unit.spec.domain for unit in units))}"
    raw_bytes = [unit.raw_bytes for unit in units]
    is_known = all(unit.slices or unit.raw_bytes for unit in units)  # a built-in converter reads no files
    with (
        progress(label, sum(raw_bytes) if is_known else None, "bytes") as advance,
        task_progress(building.units, advance) as count_finished,
    ):
        for number, summary in run(convert_unit, units):
            count_finished(raw_bytes[number] or sum(part.bytes for part in summary.parts), summary.documents)


def _select(
    domain: _Domain, building: BuildingFolder, old: Manifest, known_keys: Sequence[Path], max_shard_bytes: int
) -> _Selected:
    """Check the number of faults, select documents and plan the shards."""
    spec = domain.spec
    faults, cleaning = spec.new_fault_log(), CleaningReport()
    summaries = [UnitSummary.read(unit) for unit in domain.units]
    for summary in summaries:
        faults.merge(summary.faults)
        cleaning.merge(summary.cleaning)
    faults.check(f"of domain {spec.domain}")
    folder = building.shards(spec.domain, domain.shards_key)
    known_keys = [path for path in known_keys if path.exists()]
    parts, dropped = select(spec, [part for summary in summaries for part in summary.parts], folder, known_keys)
    documents = sum(len(part.kept()) for part in parts)
    if not documents:
        limit = "" if spec.max_bytes is None else f" of at most {spec.max_bytes} bytes"
        clean = sum(summary.documents for summary in summaries)
        rule = f"gave no document{limit} ({faults.rows} rows, {faults.bad} invalid, {clean} left after cleaning)"
        raise DataError(f"source {spec.converter} of domain {spec.domain}", rule, "Check its files and settings.")
    tasks = plan_shards(parts, folder, spec.domain, _shard_prefix(domain, old), max_shard_bytes)
    report = {
        "domain": spec.domain,
        "converter": spec.converter,
        "raw_files": len({piece.path for unit in domain.units for piece in unit.slices}),
        "faults": faults.to_json(),
        "cleaning": cleaning.to_json(),
        "dropped": dropped,
        "documents": documents,
    }
    return _Selected(domain, folder, tasks, report)


def _shard_prefix(domain: _Domain, old: Manifest) -> str:
    """Return a prefix that no shard of the old manifest uses: it stays valid until the new one replaces it."""
    if old.build_keys.get(domain.name) == domain.key:  # the same shards again, because one was lost
        return domain.name
    taken = [shard.path for shard in old.shards if shard.domain == domain.name]
    prefix, generation = domain.name, 1
    while any(path.startswith(f"{prefix}-") for path in taken):
        generation += 1
        prefix = f"{domain.name}.{generation}"
    return prefix


def _publish(
    out_dir: Path,
    building: BuildingFolder,
    old: Manifest,
    manifest: Manifest,
    selected: Sequence[_Selected],
    new: Sequence[ShardInfo],
) -> None:
    """Move the new shards into the corpus, replace the manifest, then remove files that it does not list."""
    _refuse_unlisted(out_dir, old, [one.domain for one in selected])  # a file may have appeared since
    domains = {one.domain.name: one for one in selected}
    listed = {shard.path for shard in manifest.shards}
    building.begin_publishing(
        [(shard.path, shard.domain, domains[shard.domain].domain.shards_key) for shard in new],
        [shard.path for shard in old.shards if shard.path not in listed],
    )
    make_folder(out_dir / REPORTS_NAME)
    for shard in new:
        (domains[shard.domain].folder / shard.path).replace(out_dir / shard.path)
    for name, one in domains.items():
        report = {**one.report, "bytes": sum(shard.bytes for shard in new if shard.domain == name)}
        write_whole(report_file(out_dir, name), json.dumps(report, ensure_ascii=False, indent=1) + "\n")
        new_keys, final = one.folder / KEYS_NAME, keys_file(out_dir, name)
        if new_keys.exists():
            force_to_disk(new_keys)
            publish(new_keys, final)
        else:
            final.unlink(missing_ok=True)
    force_to_disk(out_dir)
    write_manifest(out_dir, manifest)
    for name in old.build_keys.keys() - manifest.domains.keys():
        keys_file(out_dir, name).unlink(missing_ok=True)  # first: without its report it would be of the user
        report_file(out_dir, name).unlink(missing_ok=True)
    building.recover(manifest)  # removes old shards
    building.remove()
