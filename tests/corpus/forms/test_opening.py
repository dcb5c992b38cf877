"""Tests of containers: every form is read from every packing; broken and hostile files are reported as faults."""

import bz2
import gzip
import io
import json
import os
import struct
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.forms.reading import (
    as_form,
    details_of,
    faults_of,
    packed,
    read_all,
    rows_of,
    tar_of,
    write,
    zip_of,
    zst,
)
from z2all_ds.base.errors import MachineError
from z2all_ds.corpus.forms import ReadLimits, open_slice, plan_slices

PACKINGS = ("", ".gz", ".zst", ".bz2", ".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2")
ENDINGS = {"jsonl": ".jsonl", "json_array": ".json", "parquet": ".parquet", "txt": ".txt", "lines": ".lines"}
ROWS: list[dict[str, Any]] = [{"id": n, "text": f"row {n} 中文"} for n in range(300)]
TIGHT = ReadLimits(expansion_allowance_bytes=2**20)
BOMB = b'{"a": "' + b"0" * 3000 + b'"}\n'


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("form", ENDINGS)
def test_every_form_is_read_from_every_packing(tmp_path: Path, form: str, packing: str) -> None:
    member = f"data{ENDINGS[form]}"
    path = write(tmp_path, member + packing, packed(as_form(ROWS, form), member, packing))
    wanted = {
        "txt": [{"text": "\n".join(row["text"] for row in ROWS), "name": "data"}],
        "lines": [{"text": row["text"]} for row in ROWS],
    }.get(form, ROWS)
    items = read_all(path, "lines" if form == "lines" else "auto")
    assert rows_of(items) == wanted
    assert not faults_of(items)
    # With an explicit form, the name of the file does not matter.
    plain_name = write(tmp_path, "wiki_00", path.read_bytes())
    rows = rows_of(read_all(plain_name, form))
    if form == "txt":  # only the names differ
        rows, wanted = [{"text": row["text"]} for row in rows], [{"text": row["text"]} for row in wanted]
    assert rows == wanted
    if form != "lines":
        is_archive = "tar" in packing or packing in (".tgz", ".zip")
        assert plan_slices(path, "auto")[0].form == ("auto" if is_archive else form)


def test_progress_adds_up_to_the_bytes_on_disk(tmp_path: Path) -> None:
    for packing in PACKINGS:
        for form, ending in ENDINGS.items():
            path = write(tmp_path, f"p{ending}{packing}", packed(as_form(ROWS * 20, form), f"p{ending}", packing))
            for piece in plan_slices(path, form):
                advances: list[int] = []
                with open_slice(piece, ReadLimits(), advances.append) as reader:
                    list(reader)
                assert abs(sum(advances) - piece.raw_bytes) <= 600, (packing, form)


def test_each_archive_member_is_read_in_its_own_form(tmp_path: Path) -> None:
    files = {
        "a/x.jsonl": b'{"a": 1}\n{"a": \n',
        "__MACOSX/._x.jsonl": b"\0\0",
        ".hidden": b"\0",
        "b.txt": b"hello",
        "c.json": b'[{"c": 1}, 5]',
        "d.jsonl.gz": gzip.compress(b'{"d": 1}\n\n{'),
        "e.png": b"\x89PNG\0",
        "f.zip": zip_of({"f.txt": b"f"}),
    }
    for name, data in {"m.zip": zip_of(files), "m.tar.gz": gzip.compress(tar_of(files))}.items():
        items = read_all(write(tmp_path, name, data), slice_bytes=10)
        assert rows_of(items) == [{"a": 1}, {"text": "hello", "name": "b"}, {"c": 1}, {"d": 1}]
        assert faults_of(items) == [
            ("json", f"{name}!a/x.jsonl:2"),
            ("not_an_object", f"{name}!c.json, element 2 (line 1)"),
            ("truncated", f"{name}!d.jsonl.gz:3"),
            ("container", f"{name}!e.png"),
            ("container", f"{name}!f.zip"),
        ]


def test_small_zip_members_are_grouped_into_slices(tmp_path: Path) -> None:
    files = {f"{n:03}.txt": b"x" * 100 for n in range(50)}
    path = write(tmp_path, "m.zip", zip_of(files))
    assert len(plan_slices(path, "auto", 1000)) == 5
    assert len(plan_slices(path, "auto")) == 1
    assert [row["name"] for row in rows_of(read_all(path, slice_bytes=1000))] == [f"{n:03}" for n in range(50)]


def test_hostile_member_names_write_no_files_and_are_escaped_in_positions(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    names = ["../../outside.txt", "../outside.txt", str(outside), "a\x1b[31m\nb.txt", "x\u202egpj.txt"]
    files = dict.fromkeys(names, b"x")
    for name, data in {"m.zip": zip_of(files), "m.tar": tar_of(files)}.items():
        path = write(tmp_path, name, data)
        before = sorted(tmp_path.rglob("*"))
        items = read_all(path)
        assert len(rows_of(items)) == len(names)
        assert sorted(tmp_path.rglob("*")) == before
        assert not outside.exists()
        assert all(where.isprintable() for where, _ in items)


def test_links_and_devices_in_tar_files_are_skipped(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind in {"l.txt": tarfile.SYMTYPE, "h.txt": tarfile.LNKTYPE, "d.txt": tarfile.CHRTYPE}.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("good.txt")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    assert rows_of(read_all(write(tmp_path, "m.tar", file.getvalue()))) == [{"text": "x", "name": "good"}]


def test_files_of_many_gzip_members_or_zstd_frames_are_read(tmp_path: Path) -> None:
    lines = [b'{"a": %d}\n' % n for n in range(3000)]
    for name, pack in {"x.jsonl.gz": gzip.compress, "x.jsonl.zst": zst}.items():
        path = write(tmp_path, name, b"".join(map(pack, lines)))
        assert [row["a"] for row in rows_of(read_all(path))] == list(range(3000))
    padded = write(tmp_path, "y.jsonl.gz", gzip.compress(lines[0]) + b"\0" * 512)
    assert len(rows_of(read_all(padded))) == 1


NOISE = [json.dumps({"n": n, "t": str(pow(7, n, 10**9 + 7)) * 5}) for n in range(20_000)]


@pytest.mark.parametrize("packing", [".gz", ".zst", ".zip", ".tar", ".tar.gz", ".tar.zst"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_rows_before_the_damage_in_a_container_are_read(tmp_path: Path, packing: str, damage: str) -> None:
    data = packed("\n".join(NOISE).encode(), "x.jsonl", packing)
    if damage == "flip" and packing == ".tar":
        pytest.skip("a tar has no sums over its contents")
    middle = len(data) * 2 // 3
    data = (
        data[:middle]
        if damage == "cut"
        else data[:middle] + bytes(255 - b for b in data[middle : middle + 64]) + data[middle + 64 :]
    )
    items = read_all(write(tmp_path, "x.jsonl" + packing, data))
    kinds = [kind for kind, _ in faults_of(items)]
    assert kinds[-1] == "container"
    if damage == "cut":
        assert kinds == ["container"]
    if packing == ".zip" and damage == "cut":
        return  # a zip without its table of contents yields no rows
    good = [row["n"] for row in rows_of(items) if "n" in row]
    assert len(good) > 8_000 and good[:8_000] == list(range(8_000))


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.zip", "x.tar"])
def test_files_whose_content_does_not_match_their_name_are_faults(tmp_path: Path, name: str) -> None:
    items = read_all(write(tmp_path, name, b"hello, this is nothing of that kind\n" * 30))
    assert [kind for kind, _ in faults_of(items)] == ["container"]
    assert [kind for kind, _ in faults_of(read_all(write(tmp_path, name, b"")))] == ["empty_file"]


def test_decompression_bombs_are_stopped(tmp_path: Path) -> None:
    bomb = BOMB * 8_000  # 24 MB
    cases = {
        "b.jsonl.gz": gzip.compress(bomb, 9),
        "b.jsonl.zst": zst(bomb),
        "b.jsonl.bz2": bz2.compress(bomb),
        "b.zip": zip_of({"b.jsonl": bomb}),
        "b.tar.gz": gzip.compress(tar_of({"b.jsonl": bomb})),
        # Each level expands within the limit, but both together exceed it.
        "twice.tar.zst": zst(tar_of({f"{n}.jsonl.gz": gzip.compress(bomb, 1) for n in range(3)})),
        "inner.zip": zip_of({"b.jsonl.gz": gzip.compress(bomb)}, zipfile.ZIP_STORED),
    }
    for name, data in cases.items():
        items = read_all(write(tmp_path, name, data), limits=ReadLimits(100_000_000, 50, 2**20))
        kinds = [kind for kind, _ in faults_of(items)]
        assert kinds and set(kinds) == {"expansion"}, name
        members = 3 if name.startswith("twice") else 1
        assert len(rows_of(items)) < 8_000 * members, name


def test_all_members_of_a_file_share_one_budget(tmp_path: Path) -> None:
    member = gzip.compress(BOMB * 300)  # 0.9 MB, within the allowance of 1 MiB
    members = {f"{number}.jsonl.gz": member for number in range(20)}
    for name, data in {"m.tar": tar_of(members), "m.zip": zip_of(members, zipfile.ZIP_STORED)}.items():
        items = read_all(write(tmp_path, name, data), limits=ReadLimits(100_000_000, 50, 2**20), slice_bytes=10**6)
        assert {kind for kind, _ in faults_of(items)} == {"expansion"}, name
        assert len(rows_of(items)) < 20 * 300


def test_zip_members_that_overlap_are_refused(tmp_path: Path) -> None:
    data = zip_of({"a.txt": b"x" * 10_000}, zipfile.ZIP_STORED)
    entry, end = data.rindex(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    directory = data[entry:end] * 50
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 50, 50, len(directory), entry, 0)
    items = read_all(write(tmp_path, "x.zip", data[:entry] + directory + tail))
    assert [kind for kind, _ in faults_of(items)] == ["expansion"] and "overlap" in details_of(items)


def test_zip_methods_without_a_limit_are_refused(tmp_path: Path) -> None:
    items = read_all(write(tmp_path, "x.zip", zip_of({"a.txt": b"x" * 1000}, zipfile.ZIP_BZIP2)))
    assert [kind for kind, _ in faults_of(items)] == ["container"] and "bzip2" in details_of(items)


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_false_sizes_in_tar_headers_end_with_the_file(tmp_path: Path, packing: str) -> None:
    good, huge = tarfile.TarInfo("good.txt"), tarfile.TarInfo("huge.txt")
    good.size, huge.size = 1, 2**62
    start = good.tobuf() + b"x" + b"\0" * 511
    for kind in (tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, b"Q"):
        huge.type = kind
        data = start + huge.tobuf(tarfile.GNU_FORMAT) + b"some data"
        items = read_all(write(tmp_path, f"x.tar{packing}", gzip.compress(data) if packing else data))
        assert rows_of(items) == [{"text": "x", "name": "good"}]
        assert len(faults_of(items)) == 1


def test_a_huge_name_in_a_tar_header_is_refused(tmp_path: Path) -> None:
    long = tarfile.TarInfo("long")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 150_000_000
    data = gzip.compress(long.tobuf(tarfile.GNU_FORMAT) + b"a/" * 5_000_000)
    items = read_all(write(tmp_path, "x.tar.gz", data))
    assert [kind for kind, _ in faults_of(items)] == ["expansion"]


def test_names_and_sizes_from_extended_tar_headers_are_used(tmp_path: Path) -> None:
    files = {f"{'d' * 90}/{'e' * 90}/{number}.jsonl": b'{"n": %d}\n' % number for number in range(3)}
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size, info.pax_headers = len(data), {"size": str(len(data))}
                archive.addfile(info, io.BytesIO(data))
        items = read_all(write(tmp_path, "x.tar", file.getvalue()))
        assert rows_of(items) == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert items[1][0].endswith("1.jsonl:1")


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "x.jsonl"
    os.mkfifo(fifo)
    (item,) = read_all(fifo, "jsonl")
    assert "not a regular file" in item[1].detail


def test_ordinary_compressed_files_are_not_taken_for_bombs(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl.gz", gzip.compress("\n".join(NOISE).encode()))
    assert not faults_of(read_all(path, limits=ReadLimits(max_expansion=30, expansion_allowance_bytes=1000)))


def test_a_zip_file_with_a_false_member_size_is_a_fault(tmp_path: Path) -> None:
    data = bytearray(zip_of({"b.jsonl": BOMB * 1000}))
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<I", 10_000)  # the declared uncompressed size
    items = read_all(write(tmp_path, "b.zip", bytes(data)))
    assert [kind for kind, _ in faults_of(items)] == ["container"]


def test_an_encrypted_zip_member_is_a_fault_and_other_members_are_read(tmp_path: Path) -> None:
    data = bytearray(zip_of({"a.jsonl": b'{"a": 1}\n', "b.jsonl": b'{"b": 1}\n'}))
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(magic) + offset] |= 1
    items = read_all(write(tmp_path, "x.zip", bytes(data)))
    assert faults_of(items) == [("container", "x.zip!a.jsonl")]
    assert "encrypted" in details_of(items)
    assert rows_of(items) == [{"b": 1}]


def test_a_sparse_tar_member_is_a_fault(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("s.txt")
        info.size = 10
        info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(2**60), "GNU.sparse.map": "0,10"}
        archive.addfile(info, io.BytesIO(b"x" * 10))
    items = read_all(write(tmp_path, "x.tar", file.getvalue()))
    assert [kind for kind, _ in faults_of(items)] == ["container"]


def test_a_missing_zstandard_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "x.jsonl.zst", zst(b"{}\n"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MachineError, match=r"z2all_ds\[corpus\]"):
        read_all(path, "jsonl")


def test_a_file_that_was_deleted_after_planning_is_a_fault(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", b"{}\n")
    (piece,) = plan_slices(path, "auto")
    path.unlink()
    with open_slice(piece, ReadLimits(), lambda _: None) as reader:
        (fault,) = reader
    assert fault.kind == "container" and "No such file" in fault.detail


def test_an_unusable_spool_folder_is_reported(tmp_path: Path) -> None:
    (piece,) = plan_slices(write(tmp_path, "x.parquet.gz", gzip.compress(as_form(ROWS, "parquet"))), "auto")
    with open_slice(piece, ReadLimits(), lambda _: None, tmp_path / "missing") as reader:
        with pytest.raises(MachineError, match="TMPDIR"):
            list(reader)
