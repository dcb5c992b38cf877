"""What is in a raw file: itself, what it packs, or the members of an archive, each as a stream of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.archives import tar_members, zip_members
from z2all_ds.corpus.forms.slices import ReadLimits
from z2all_ds.corpus.forms.streams import (
    TAR_PEEK_BYTES,
    CompressedStream,
    DiskFile,
    ExpansionGuard,
    Peekable,
    Unreadable,
    packing_of,
    without_packing_endings,
)


@dataclass(frozen=True)
class Content:
    """One file's worth of rows. `member` is empty for a file that is no archive; `name` has no packing endings."""

    name: str
    member: str
    stream: Peekable | Fault


def packing_of_file(path: Path) -> str:
    """gz, zst, zip, tar or nothing. A file that cannot be opened has none; reading it says why."""
    try:
        with path.open("rb") as file:
            return packing_of(file.read(TAR_PEEK_BYTES), path.name)
    except OSError:
        return ""


def contents(
    disk: DiskFile, path: Path, limits: ReadLimits, start: int = 0, stop: int | None = None
) -> Iterator[Content]:
    """Each content must be read before the next is asked for. Raises `Unreadable` where the container is broken."""
    name = without_packing_endings(path.name)
    stream = Peekable(disk)
    packing = packing_of(stream.peek(TAR_PEEK_BYTES), path.name)
    if packing == "zip":
        for member in zip_members(disk, limits, start, stop):
            yield _member_content(member.name, member.content, disk, limits)
        return
    if packing in ("gz", "zst"):
        stream = Peekable(CompressedStream(stream, packing, ExpansionGuard(disk, limits)))
        packed_tar = path.name.lower().endswith((".tgz", ".tzst", ".tar.gz", ".tar.zst"))
        packing = packing_of(stream.peek(TAR_PEEK_BYTES), ".tar" if packed_tar else "")
    if packing == "tar":
        for member in tar_members(stream):
            yield _member_content(member.name, member.content, disk, limits)
    elif packing:
        yield Content(name, "", Fault("container", f"{packing} data in packed data; unpack it once"))
    else:
        yield Content(name, "", stream)


def _member_content(member: str, content: Peekable | Fault, disk: DiskFile, limits: ReadLimits) -> Content:
    if isinstance(content, Fault):
        return Content(member, member, content)
    name = without_packing_endings(member)
    try:
        packing = packing_of(content.peek(TAR_PEEK_BYTES), member)
        if packing in ("gz", "zst"):
            content = Peekable(CompressedStream(content, packing, ExpansionGuard(disk, limits)))
            packing = packing_of(content.peek(TAR_PEEK_BYTES), "")
        if packing:
            return Content(name, member, Fault("container", f"{packing} inside an archive; unpack the outer one first"))
    except Unreadable as end:
        return Content(name, member, end.fault)
    return Content(name, member, content)
