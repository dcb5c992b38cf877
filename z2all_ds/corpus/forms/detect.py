"""Which form a raw file has: by its name, and by its first bytes where the name does not tell."""

import re
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.faults import Fault
from z2all_ds.corpus.forms.naming import harmless
from z2all_ds.corpus.forms.parquet import MAGIC
from z2all_ds.corpus.forms.slices import ReadLimits
from z2all_ds.corpus.forms.streams import DiskFile, Unreadable, without_packing_endings
from z2all_ds.corpus.forms.unpack import contents

FORMS = ("jsonl", "json_array", "parquet", "txt", "lines")
_PEEK_BYTES = 4096
_BY_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
_TEXT_ENDINGS = {".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".py", ".html", ".htm"}
_OTHER_FORMATS = {
    ".csv": "pandas.read_csv(...).to_json(..., orient='records', lines=True) makes JSON lines of it.",
    ".tsv": "pandas.read_csv(..., sep='\\t').to_json(..., orient='records', lines=True) makes JSON lines of it.",
    ".bz2": "Unpack it with bunzip2, or repack it as .gz or .zst.",
    ".xz": "Unpack it with unxz, or repack it as .gz or .zst.",
    ".7z": "Unpack it with 7z x.",
    ".rar": "Unpack it with unrar x.",
    ".arrow": "datasets.Dataset.from_file(...).to_parquet(...) makes Parquet of it.",
    ".pdf": "Take the text out first, e.g. with pdftotext.",
}


def check_form(form: str) -> None:
    if form not in (*FORMS, "auto"):
        raise ConfigError(f"form {form!r}", f"must be one of {', '.join(FORMS)} or auto", "Leave it out.")


def form_by_name(name: str) -> str | None:
    """Of a name without packing endings; None when the first bytes have to be asked."""
    ending = Path(name).suffix.lower()
    return "txt" if ending in _TEXT_ENDINGS else _BY_ENDING.get(ending)


def form_of(name: str, head: bytes) -> str:
    """Of a name without packing endings and the first bytes behind it."""
    form = form_by_name(name)
    if form:
        return form
    ending = Path(name).suffix.lower()
    rule = f"is of no form that can be read ({', '.join(FORMS)})"
    if ending in _OTHER_FORMATS:
        raise ConfigError(harmless(name), rule, _OTHER_FORMATS[ending])
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if ending == ".json":
        return "json_array" if text.startswith(b"[") else "jsonl"
    if head.startswith(MAGIC):
        return "parquet"
    if b"\0" in head:
        raise ConfigError(harmless(name), rule, "It looks binary; leave it out, or name its form.")
    if not ending and re.match(rb"\[\s*\{", text):
        return "json_array"
    return "jsonl" if not ending and re.match(rb'\{\s*"', text) else "txt"


def detect_form(path: Path) -> str:
    """The form of a file; of an archive that of its first member with one (`auto` reads each by its own)."""
    return detect(path)[0]


def detect(path: Path) -> tuple[str, bool]:
    """The form, and whether it is an archive, whose members may differ."""
    refused: ConfigError | None = None
    is_archive = False
    disk = None
    try:
        disk = DiskFile(path, lambda _: None)
        for content in contents(disk, path, ReadLimits()):
            is_archive = bool(content.member)
            head = b"" if isinstance(content.stream, Fault) else content.stream.peek(_PEEK_BYTES)
            try:
                return form_of(content.name, head), is_archive
            except ConfigError as error:
                refused = refused or error
    except Unreadable:
        pass  # reading it says what is wrong
    finally:
        if disk:
            disk.close()
    if refused:
        raise ConfigError(str(path), refused.rule, refused.fix)
    name = without_packing_endings(path.name)
    return form_by_name(name) or ("jsonl" if name.lower().endswith(".json") else "txt"), is_archive
