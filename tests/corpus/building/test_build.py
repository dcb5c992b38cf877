import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpora import SMALL_SOURCES, build_small_corpus
from tests.helpers.processes import ended
from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import ConfigError, DataError, MachineError
from z2all_ds.corpus import Executor, Manifest, SourceSpec, audit_corpus, build_corpus, load_manifest, parse_record
from z2all_ds.corpus.building import build as build_module
from z2all_ds.corpus.building import parts as parts_module
from z2all_ds.corpus.building import shards as shards_module
from z2all_ds.corpus.building import units as units_module
from z2all_ds.corpus.building.folder import build_lock
from z2all_ds.corpus.cleaning import CleaningRules

pytestmark = pytest.mark.usefixtures("a_unit_for_each_slice")
BILLION = 1_000_000_000
grouped = build_module._grouped


def files(folder: Path) -> dict[str, bytes]:
    """Return the files that a build writes, without the line indexes and token counts of readers."""
    of_readers = (".idx", ".token-counts")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(of_readers))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_the_progress_of_a_built_in_converter_shows_the_size_of_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = SourceSpec("notes", "text", (tmp_path / "x.txt",))
    (tmp_path / "x.txt").write_text("a short note")
    manifest = build_corpus(tmp_path / "c", [SourceSpec("zh", "chinese_sample"), notes])
    documents, size = manifest.domains["zh"]
    assert size > 1000
    line = f"corpus zh, notes: {human_bytes(size + len('a short note'))}, {documents + 1:,} records in "
    assert capsys.readouterr().err.startswith(line)


def names(folder: Path) -> list[str]:
    return [name for name in files(folder) if not name.startswith("reports/")]


def records(folder: Path, manifest: Manifest) -> list:
    lines = [line for shard in manifest.shards for line in (folder / shard.path).read_bytes().splitlines(keepends=True)]
    return [parse_record(line, "x") for line in lines]


def raw_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def many_files(folder: Path, count: int, rows: int = 40) -> tuple[Path, ...]:
    folder.mkdir()
    return tuple(
        raw_jsonl(folder / f"{n:03d}.jsonl", [f"file {n} row {row} " * (1 + row % 7) for row in range(rows)])
        for n in range(count)
    )


def test_the_small_corpus_is_intact(small_corpus: Path) -> None:
    manifest = load_manifest(small_corpus)
    report = audit_corpus(small_corpus)
    assert report.problems == ()
    assert report.documents == sum(documents for documents, _ in manifest.domains.values())
    assert list(manifest.domains) == ["code", "en", "zh"]
    for spec in SMALL_SOURCES:
        assert spec.max_bytes
        assert 0.97 * spec.max_bytes < manifest.domains[spec.domain][1] <= spec.max_bytes
    assert max(shard.bytes for shard in manifest.shards) <= 120_000
    code = [shard.path for shard in manifest.shards if shard.domain == "code"]
    assert len(code) > 2 and code == [f"code-{number:05d}.jsonl" for number in range(len(code))]
    found = records(small_corpus, manifest)
    assert manifest.next_gid == 3 * BILLION
    for number, domain in enumerate(manifest.domains):
        ids = [record.id for record in found if record.data_src == domain]
        assert ids == sorted(set(ids))
        assert [record.gid for record in found if record.data_src == domain] == [number * BILLION + id for id in ids]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_sources_give_the_same_bytes(small_corpus: Path, tmp_path: Path, workers: int) -> None:
    build_corpus(tmp_path / "again", SMALL_SOURCES, max_shard_bytes=120_000, executor=Executor(workers))
    assert files(tmp_path / "again") == files(small_corpus)


def test_the_number_of_workers_and_slices_does_not_change_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = many_files(tmp_path / "raw", 7)
    spec = [SourceSpec("a", "jsonl", raw[:4]), SourceSpec("b", "jsonl", raw[4:])]
    build_corpus(tmp_path / "one", spec, max_shard_bytes=5_000)
    build_corpus(tmp_path / "three", spec, max_shard_bytes=5_000, executor=Executor(3))
    assert files(tmp_path / "one") == files(tmp_path / "three")
    plan = build_module.plan_slices
    monkeypatch.setattr(build_module, "plan_slices", lambda path, form, size: plan(path, form, 500))
    whole = records(tmp_path / "one", load_manifest(tmp_path / "one"))
    sliced = records(tmp_path / "sliced", build_corpus(tmp_path / "sliced", spec, max_shard_bytes=5_000))
    assert [record.content for record in sliced] == [record.content for record in whole]
    in_a_file = [file * BILLION + row for file in range(7) for row in range(40)]
    assert [record.gid for record in whole] == in_a_file
    assert [record.id for record in whole] == [*in_a_file[: 4 * 40], *in_a_file[: 3 * 40]]
    assert len({record.gid for record in sliced}) == 7 * 40


def test_small_files_are_grouped_into_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = many_files(tmp_path / "raw", 7)
    monkeypatch.setattr(build_module, "_grouped", grouped)
    one = records(tmp_path / "one", build_corpus(tmp_path / "one", [SourceSpec("a", "jsonl", raw)]))
    assert [record.gid for record in one] == list(range(7 * 40))
    assert [record.content.split()[1] for record in one] == [str(file) for file in range(7) for _ in range(40)]
    sizes = [path.stat().st_size for path in raw]
    monkeypatch.setattr(build_module, "SMALLEST_UNIT_BYTES", sum(sizes[:3]))
    three = records(tmp_path / "three", build_corpus(tmp_path / "three", [SourceSpec("a", "jsonl", raw)]))
    assert [record.content for record in three] == [record.content for record in one]
    assert [record.gid // BILLION for record in three] == [0] * 120 + [1] * 120 + [2] * 40


def test_a_file_that_cannot_be_split_becomes_shards_without_copying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"row {row} " * 20 for row in range(300)]
    (tmp_path / "raw.json").write_text(json.dumps([{"text": text} for text in texts]))
    monkeypatch.setattr(parts_module, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(shards_module, "_copy", lambda *_: pytest.fail("copied"))
    spec = [SourceSpec("a", "generic", (tmp_path / "raw.json",))]
    manifest = build_corpus(tmp_path / "c", spec, max_shard_bytes=10_000)
    assert max(shard.bytes for shard in manifest.shards) <= 10_000
    assert len(manifest.shards) > 5
    assert [record.content for record in records(tmp_path / "c", manifest)] == texts
    assert audit_corpus(tmp_path / "c").ok
    assert all((tmp_path / "c" / shard.path).stat().st_nlink == 1 for shard in manifest.shards)


def test_a_unit_with_more_documents_than_ids_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "IDS_PER_UNIT", 5)
    five, six = (raw_jsonl(tmp_path / f"{count}.jsonl", ["text"] * count) for count in (5, 6))
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (five,))])
    with pytest.raises(DataError, match=r"6\.jsonl: more than 5 documents in a file that cannot be split"):
        build_corpus(tmp_path / "d", [SourceSpec("a", "jsonl", (six,))])
    assert not list((tmp_path / "d" / ".building" / "units").iterdir())


def test_a_finished_corpus_is_not_built_again(
    small_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_corpus, tmp_path / "copy")
    monkeypatch.setattr(build_module, "_convert", lambda *_: pytest.fail("built again"))
    assert build_small_corpus(tmp_path / "copy") == load_manifest(small_corpus)


def test_domains_are_added_one_by_one(tmp_path: Path) -> None:
    raw = many_files(tmp_path / "raw", 3)
    first = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", raw[:1])], add=True)
    before = files(tmp_path / "c")
    second = build_corpus(tmp_path / "c", [SourceSpec("b", "jsonl", raw[1:])], add=True)
    assert {name: data for name, data in files(tmp_path / "c").items() if name in before and name[0] != "M"} == {
        name: data for name, data in before.items() if name[0] != "M"
    }
    assert list(second.domains) == ["a", "b"]
    assert second.shards[:1] == first.shards
    assert [record.gid for record in records(tmp_path / "c", second)] == [
        file * BILLION + row for file in range(3) for row in range(40)
    ]
    assert build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", raw[:1])], add=True) == second
    # A replaced domain gets new gids and file names: no gid is ever reused, and the manifest is valid at all times.
    third = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", raw[2:])], add=True, replace=True)
    assert sorted(names(tmp_path / "c")) == ["MANIFEST.json", "a.2-00000.jsonl", "b-00000.jsonl"]
    gids = [record.gid for record in records(tmp_path / "c", third) if record.data_src == "a"]
    assert gids == list(range(3 * BILLION, 3 * BILLION + 40))
    assert third.next_gid == 4 * BILLION
    assert audit_corpus(tmp_path / "c").ok


def test_domains_missing_from_the_sources_are_removed_only_with_replace(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["one", "two"])
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,)), SourceSpec("b", "jsonl", (raw,))])
    with pytest.raises(ConfigError, match=r"domain b .*not among the sources"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))])
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))], replace=True)
    assert sorted(names(tmp_path / "c")) == ["MANIFEST.json", "a-00000.jsonl"]
    assert sorted(files(tmp_path / "c")) == ["MANIFEST.json", "a-00000.jsonl", "reports/a.json"]
    assert audit_corpus(tmp_path / "c").ok


def test_a_lost_shard_is_rebuilt_and_a_changed_raw_file_is_refused(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["one", "two"])
    spec = [SourceSpec("a", "jsonl", (raw,))]
    before = build_corpus(tmp_path / "c", spec)
    (tmp_path / "c" / "a-00000.jsonl").unlink()
    assert build_corpus(tmp_path / "c", spec) == before
    assert audit_corpus(tmp_path / "c").ok
    raw_jsonl(raw, ["one", "two", "three"])
    with pytest.raises(ConfigError, match="other raw files or settings"):
        build_corpus(tmp_path / "c", spec)


# Interrupted builds


def whole_build(folder: Path, spec: list[SourceSpec]) -> dict[str, bytes]:
    build_corpus(folder, spec, max_shard_bytes=5_000)
    return files(folder)


@pytest.mark.parametrize(
    ("step", "calls"),
    [(step, calls) for step in ("convert_unit", "make_shard") for calls in (1, 2, 3)]
    + [("begin_publishing", 1), ("write_manifest", 1)],
)
def test_an_interrupted_build_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, calls: int) -> None:
    """After an interrupt before the n-th call of a step, no corpus is visible and finished work is not repeated."""
    raw = many_files(tmp_path / "raw", 4)
    rules = CleaningRules(exact_duplicates=True)  # adds the files with content keys for later domains
    spec = [SourceSpec("a", "jsonl", raw[:2], cleaning=rules), SourceSpec("b", "jsonl", raw[2:], cleaning=rules)]
    expected = whole_build(tmp_path / "unbroken", spec)
    owner = build_module.BuildingFolder if step == "begin_publishing" else build_module
    real, left = getattr(owner, step), calls

    def interrupt_at_last(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(owner, step, interrupt_at_last)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path / "c", spec, max_shard_bytes=5_000)
    with pytest.raises(DataError, match="no such file"):
        load_manifest(tmp_path / "c")
    done: list[str] = []
    convert = build_module.convert_unit if step != "convert_unit" else real

    def convert_and_record(unit: Any) -> Any:
        done.append("unit")
        return convert(unit)

    monkeypatch.setattr(owner, step, real)
    monkeypatch.setattr(build_module, "convert_unit", convert_and_record)
    build_corpus(tmp_path / "c", spec, max_shard_bytes=5_000)
    assert files(tmp_path / "c") == expected
    assert len(done) == (4 - (calls - 1) if step == "convert_unit" else 0)


def test_an_interruption_while_shards_are_moved_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = many_files(tmp_path / "raw", 2)
    spec = [SourceSpec("a", "jsonl", raw)]
    expected = whole_build(tmp_path / "unbroken", spec)
    moves = 0
    real = Path.replace

    def replace_twice(self: Path, target: Path) -> Path:
        nonlocal moves
        if self.suffix == ".jsonl":
            moves += 1
            if moves == 3:
                raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace_twice)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path / "c", spec, max_shard_bytes=5_000)
    monkeypatch.undo()
    assert len(list((tmp_path / "c").glob("*.jsonl"))) == 2
    # A build of another source removes the shards that were already moved.
    other = [SourceSpec("b", "jsonl", raw)]
    build_corpus(tmp_path / "c", other, max_shard_bytes=5_000)
    assert all(name.startswith(("b-", "MANIFEST")) for name in names(tmp_path / "c"))
    shutil.rmtree(tmp_path / "c")
    build_corpus(tmp_path / "c", spec, max_shard_bytes=5_000)
    assert files(tmp_path / "c") == expected


def test_an_interruption_after_writing_the_manifest_is_completed_by_the_next_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted build did not remove the old shards; the next build does."""
    raw = many_files(tmp_path / "raw", 2)
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", raw[:1])])
    spec = [SourceSpec("a", "jsonl", raw[1:])]

    def write_and_interrupt(folder: Path, manifest: Manifest) -> None:
        write(folder, manifest)
        raise KeyboardInterrupt

    write = build_module.write_manifest
    monkeypatch.setattr(build_module, "write_manifest", write_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(tmp_path / "c", spec, replace=True)
    monkeypatch.undo()
    after = load_manifest(tmp_path / "c")
    assert (tmp_path / "c" / "a-00000.jsonl").exists()
    assert build_corpus(tmp_path / "c", spec, replace=True) == after
    assert names(tmp_path / "c") == ["MANIFEST.json", "a.2-00000.jsonl"]
    assert audit_corpus(tmp_path / "c").ok


def test_after_a_raw_file_is_repaired_finished_files_are_not_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = many_files(tmp_path / "raw", 3)
    good = raw[1].read_bytes()
    raw[1].write_bytes(good + b"{broken\n")
    spec = [SourceSpec("a", "jsonl", raw)]
    with pytest.raises(DataError, match=r"001\.jsonl:41: not JSON.*--on-error skip"):
        build_corpus(tmp_path / "c", spec)
    raw[1].write_bytes(good)
    done: list[str] = []
    real: Any = build_module.convert_unit

    def convert_and_tell(unit: Any) -> Any:
        done.append(unit.slices[0].path)
        return real(unit)

    monkeypatch.setattr(build_module, "convert_unit", convert_and_tell)
    build_corpus(tmp_path / "c", spec)
    assert [Path(path).name for path in done] == ["001.jsonl", "002.jsonl"]


SLOW_BUILD = """
import sys, time
from pathlib import Path
from z2all_ds.corpus import Executor, SourceSpec, build_corpus
from z2all_ds.corpus.building import build

build._grouped = lambda slices, _: [[piece] for piece in slices]

if __name__ == "__main__":
    raw = tuple(sorted(Path(sys.argv[1]).iterdir()))
    spec = SourceSpec("a", sys.argv[4], raw, plugin=Path(sys.argv[3]))
    build_corpus(sys.argv[2], [spec], max_shard_bytes=5_000, executor=Executor(2))
"""
SLOW_PLUGIN = """
import time
from z2all_ds.corpus.converters import source
from z2all_ds.corpus.draft import Draft

@source("{name}", form="jsonl")
def slow_lines(row):
    '''Sleeps for every row.'''
    time.sleep({seconds})
    return Draft("", row.pop("text"), others=row)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_build_continues(tmp_path: Path, number: signal.Signals) -> None:
    raw = many_files(tmp_path / "raw", 6)
    (tmp_path / "build.py").write_text(SLOW_BUILD)
    plugin = tmp_path / "plugin.py"
    name = f"slow_{number.name}"
    plugin.write_text(SLOW_PLUGIN.format(name=name, seconds=0.01))
    arguments = [tmp_path / "build.py", tmp_path / "raw", tmp_path / "c", plugin, name]
    command = [sys.executable, *map(str, arguments)]
    units = tmp_path / "c" / ".building" / "units"
    with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as build:
        deadline = time.monotonic() + 60
        while not list(units.glob("*.json")):
            assert build.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        build.send_signal(number)
        build.wait(30)
    assert not (tmp_path / "c" / "MANIFEST.json").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in units.glob("*.json")}
    assert 0 < len(finished) < 6
    subprocess.run(command, check=True, capture_output=True)
    whole_build(tmp_path / "unbroken", [SourceSpec("a", name, raw, plugin=plugin)])
    assert files(tmp_path / "c") == files(tmp_path / "unbroken")
    assert not (tmp_path / "c" / ".building").exists()
    assert multiprocessing.active_children() == []


def test_two_builds_into_one_folder_are_refused(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["one"])
    with build_lock(tmp_path / "c"), pytest.raises(ConfigError, match="another build is in progress"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))])
    build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))])


# Limits


def test_max_bytes_selects_whole_documents_spread_over_the_whole_source(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", [f"document {n:04d} " * 5 for n in range(1000)])
    manifest = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,), max_bytes=40_000)])
    assert 39_500 < manifest.domains["a"][1] <= 40_000
    ids = [record.id for record in records(tmp_path / "c", manifest)]
    assert ids == sorted(ids)
    for tenth in range(10):
        in_tenth = sum(tenth * 100 <= number < tenth * 100 + 100 for number in ids)
        assert 0.4 * len(ids) / 10 < in_tenth < 1.8 * len(ids) / 10


def test_max_bytes_above_the_size_of_the_source_selects_everything(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["a", "b", "c"])
    manifest = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,), max_bytes=10**9)])
    assert [record.content for record in records(tmp_path / "c", manifest)] == ["a", "b", "c"]


def test_a_document_larger_than_max_bytes_does_not_end_the_selection(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["x" * 300_000, *["small"] * 50])
    manifest = build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,), max_bytes=4_000)])
    assert manifest.domains["a"][0] > 25


def test_a_full_disk_is_reported_and_leaves_no_partial_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["a"])

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"the disk or the quota is full. Free some space"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (raw,))])
    assert names(tmp_path / "c") == [".building/.z2all_temporary", ".building/lock"]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "at least one"),
        ([SourceSpec("a", "nope")], "must be one of baike2018qa, "),
        ([SourceSpec("a/b", "python_code")], "becomes a file name"),
        ([SourceSpec("a", "python_code"), SourceSpec("a", "chinese_sample")], "used by two sources"),
        ([SourceSpec("a", "jsonl")], "needs raw files"),
        ([SourceSpec("a", "python_code", (Path("x"),))], "takes no raw files"),
        ([SourceSpec("a", "python_code", max_bytes=0)], "must be positive"),
        ([SourceSpec("a", "python_code", on_error="ignore")], "--on-error ignore: must be stop or skip"),
        ([SourceSpec("a", "python_code", max_bad_share=2)], "from 0 to 1"),
        ([SourceSpec("a", "wudao", (Path("x"),), fields=(("content", "y"),))], "has fixed fields"),
        ([SourceSpec("a", "python_code", compose="{titel}")], "no field 'titel'"),
        ([SourceSpec("a", "python_code", plugin=Path("nowhere.py"))], "no such Python file"),
    ],
)
def test_invalid_sources_are_refused(tmp_path: Path, specs: list[SourceSpec], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_corpus(tmp_path / "c", specs)
    assert not (tmp_path / "c").exists()


def test_an_output_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    raw = raw_jsonl(tmp_path / "raw.jsonl", ["one"])
    for place in (raw, raw / "inside", Path("/proc/none")):
        with pytest.raises(ConfigError, match=r"cannot be created .*Choose another\.$"):
            build_corpus(place, [SourceSpec("a", "jsonl", (raw,))])


def test_missing_empty_and_oversized_data_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (tmp_path / "none",))])
    empty = raw_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match="an empty file"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (empty,))])
    blank = raw_jsonl(tmp_path / "blank.jsonl", ["", " \n"])
    with pytest.raises(DataError, match=r"gave no document \(2 rows, 0 invalid"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (blank,))])
    big = raw_jsonl(tmp_path / "big.jsonl", ["small", "x" * 2000])
    with pytest.raises(DataError, match=r"document 1 of domain a.*more than a whole shard"):
        build_corpus(tmp_path / "c", [SourceSpec("a", "jsonl", (big,))], max_shard_bytes=1000)
