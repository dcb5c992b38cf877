"""Detects the packing and the form of a file from its first bytes and its name."""

import re
from codecs import BOM_UTF8
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.forms.slices import printable

FORMS = ("jsonl", "json_array", "parquet", "txt", "lines")
HEAD_BYTES = 4096
"""Number of first bytes that the functions below need."""
PARQUET_MAGIC = b"PAR1"
_PACKING_MAGICS = {
    "gz": (b"\x1f\x8b",),
    "zst": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n, 0x2A, 0x4D, 0x18]) for n in range(16))),
    "bz2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    "zip": (b"PK\x03\x04", b"PK\x05\x06"),
}
_PACKING_ENDINGS = {
    "gz": (".gz", ".tgz"),
    "zst": (".zst", ".tzst"),
    "bz2": (".bz2", ".tbz2", ".tbz"),
    "zip": (".zip",),
    "tar": (".tar",),
}
_STRIPPED_ENDINGS = re.compile(r"(?is)(?<=.)(\.tar|\.zip|\.tgz|\.tzst|\.tbz2?|(\.tar)?\.(gz|zst|bz2))\Z")
_FORM_BY_ENDING = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".py", ".html", ".htm"), "txt"),
}
_OTHER_FORMATS = {
    ".csv": "Convert it to JSON lines: pandas.read_csv(...).to_json(..., orient='records', lines=True).",
    ".tsv": "Convert it to JSON lines: pandas.read_csv(..., sep='\\t').to_json(..., orient='records', lines=True).",
    ".xz": "Unpack it with unxz, or repack it as .gz or .zst.",
    ".7z": "Unpack it with 7z x.",
    ".rar": "Unpack it with unrar x.",
    ".arrow": "Convert it to Parquet: datasets.Dataset.from_file(...).to_parquet(...).",
    ".pdf": "Extract the text first, e.g. with pdftotext.",
}


def packing_of(head: bytes, name: str) -> str:
    """Return gz, zst, bz2, zip, tar or "": by the first bytes, else by the name. An empty file has no packing."""
    for packing, magics in _PACKING_MAGICS.items():
        if head.startswith(magics):
            return packing
    if head[257:262] == b"ustar":
        return "tar"
    endings = _PACKING_ENDINGS.items() if head else ()
    return next((packing for packing, names in endings if name.lower().endswith(names)), "")


def without_packing_endings(name: str) -> str:
    """Return `a` for `a.tar.gz`, `a.jsonl` for `a.jsonl.zst`."""
    return _STRIPPED_ENDINGS.sub("", name)


def form_of(name: str, head: bytes) -> str:
    """Return the form of a file with this name (without packing endings) and these first bytes."""
    ending = Path(name).suffix.lower()
    if form := _FORM_BY_ENDING.get(ending):
        return form
    rule = f"has an unsupported format (supported: {', '.join(FORMS)})"
    if ending in _OTHER_FORMATS:
        raise ConfigError(printable(name), rule, _OTHER_FORMATS[ending])
    text = head.removeprefix(BOM_UTF8).lstrip()
    if ending == ".json":
        return "json_array" if text.startswith(b"[") else "jsonl"
    if head.startswith(PARQUET_MAGIC):
        return "parquet"
    if b"\0" in head:
        raise ConfigError(printable(name), rule, "It looks binary; leave it out, or set its form.")
    if not ending and re.match(rb"\[\s*\{", text):
        return "json_array"
    return "jsonl" if not ending and re.match(rb'\{\s*"', text) else "txt"
