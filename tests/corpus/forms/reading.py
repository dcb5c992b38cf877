"""Helpers that read all slices of a file and make packed files."""

import bz2
import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from z2all_ds.corpus.faults import KINDS, Fault
from z2all_ds.corpus.forms import ReadLimits, Row, open_slice, plan_slices

Items = list[tuple[str, Row | Fault]]


def read_all(path: Path, form: str = "auto", limits: ReadLimits | None = None, slice_bytes: int = 2**27) -> Items:
    """Return every row and fault with its position."""
    items: Items = []
    for piece in plan_slices(path, form, slice_bytes):
        with open_slice(piece, limits or ReadLimits(), lambda _: None) as reader:
            items += [(reader.where(), item) for item in reader]
    assert all(item.kind in KINDS and "\n" not in item.detail for _, item in items if isinstance(item, Fault))
    return items


def rows_of(items: Items) -> list[Row]:
    return [item for _, item in items if not isinstance(item, Fault)]


def faults_of(items: Items) -> list[tuple[str, str]]:
    """Return (kind, position without the folder) of each fault."""
    return [(item.kind, where.rpartition("/case/")[2]) for where, item in items if isinstance(item, Fault)]


def details_of(items: Items) -> str:
    return " | ".join(item.detail for _, item in items if isinstance(item, Fault))


def as_form(rows: list[Row], form: str) -> bytes:
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if form == "json_array":
        return json.dumps(rows, ensure_ascii=False, indent=1).encode()
    if form == "parquet":
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), file)
        return file.getvalue()
    return "\n".join(row["text"] for row in rows).encode()


def tar_of(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zip_of(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def packed(data: bytes, member: str, packing: str) -> bytes:
    return {
        "": lambda: data,
        ".gz": lambda: gzip.compress(data),
        ".zst": lambda: zst(data),
        ".bz2": lambda: bz2.compress(data),
        ".tar.bz2": lambda: bz2.compress(tar_of({member: data})),
        ".zip": lambda: zip_of({member: data}),
        ".tar": lambda: tar_of({member: data}),
        ".tar.gz": lambda: gzip.compress(tar_of({member: data})),
        ".tgz": lambda: gzip.compress(tar_of({member: data})),
        ".tar.zst": lambda: zst(tar_of({member: data})),
    }[packing]()


def write(folder: Path, name: str, data: Any) -> Path:
    path = folder / "case" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path
