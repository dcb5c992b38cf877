"""Settings of a build: the sources, and how each is read and cleaned."""

import hashlib
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from z2all_ds.base.errors import ConfigError
from z2all_ds.corpus.cleaning import CleaningRules
from z2all_ds.corpus.cleaning.near_duplicates import require_datasketch
from z2all_ds.corpus.converters import BuiltIn, Source, field_map_converter, find_converter, load_plugin
from z2all_ds.corpus.converters.builtin import CHINESE_TEXTS
from z2all_ds.corpus.draft import check_template
from z2all_ds.corpus.faults import FaultLog
from z2all_ds.corpus.forms import FORMS, ReadLimits
from z2all_ds.corpus.manifest import FORMAT_VERSION

MAX_SHARD_BYTES = 200_000_000
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class SourceSpec:
    """The source of one domain of the corpus."""

    domain: str
    converter: str
    raw: tuple[Path, ...] = ()
    """Files, folders or patterns; empty for a built-in converter."""
    max_bytes: int | None = None
    """Maximum size of the domain as JSON. Whole documents are chosen at random up to it."""
    form: str = ""
    """Format of the raw files, if the converter sets none."""
    fields: tuple[tuple[str, str], ...] = ()
    """For the generic converter: (field of the record, field of the raw data)."""
    compose: str = ""
    """Template of the content, e.g. "{title}\\n{content}"; empty keeps the content unchanged."""
    cleaning: CleaningRules = field(default_factory=CleaningRules)
    on_error: str = "stop"
    max_bad_share: float = 0.01
    limits: ReadLimits = field(default_factory=ReadLimits)
    plugin: Path | None = None
    """Python file that registers the converter."""
    follow_links: bool = False
    """Read files outside of the raw folders that links in them lead to."""
    is_code: bool = False
    """The texts are code, whatever the converter: cleaning does not alter them."""

    def load_converter(self) -> Source | BuiltIn:
        """Load the plugin, if any, and return the converter."""
        if self.plugin is not None:
            load_plugin(self.plugin)
        return find_converter(self.converter)

    def new_fault_log(self) -> FaultLog:
        return FaultLog(self.on_error, self.max_bad_share)

    def output_key(self) -> list[object]:
        """Return everything that determines the record made from a row. `on_error` only decides if there is one."""
        found = self.load_converter()
        parts: list[object] = [FORMAT_VERSION, self.domain, found.name, found.revision, self.form, self.fields]
        parts += [self.compose, asdict(self.cleaning), asdict(self.limits)]
        if isinstance(found, BuiltIn):  # its text comes from this Python and from a shipped file
            parts += [self.max_bytes, platform.python_version()]
            parts.append(hashlib.sha256(CHINESE_TEXTS.read_bytes()).hexdigest())
        if self.is_code:
            parts.append("code")
        if self.plugin is not None:
            parts.append(hashlib.sha256(self.plugin.read_bytes()).hexdigest())
        return parts


def short_hash(parts: object) -> str:
    """Return 32 hexadecimal digits that identify a JSON value."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def check_sources(sources: Sequence[SourceSpec], max_shard_bytes: int) -> None:
    """Raise for invalid settings, before any data is read."""
    if not sources:
        raise ConfigError("sources", "a corpus needs at least one", "Give a domain and its converter.")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes {max_shard_bytes}", "must be positive", f"Use {MAX_SHARD_BYTES}.")
    seen: set[str] = set()
    for spec in sources:
        _check_one(spec)
        if spec.domain in seen:
            fix = "Rename one of them, or give all raw files to one source."
            raise ConfigError(f"domain {spec.domain!r}", "used by two sources", fix)
        seen.add(spec.domain)


def _check_one(spec: SourceSpec) -> None:
    if not _DOMAIN.fullmatch(spec.domain):
        raise ConfigError(f"domain {spec.domain!r}", "it becomes a file name", "Use letters, digits, _, - and dots.")
    if spec.max_bytes is not None and spec.max_bytes < 1:
        what = f"max_bytes {spec.max_bytes} of {spec.domain}"
        raise ConfigError(what, "must be positive", "Omit it to take everything.")
    found = spec.load_converter()
    if isinstance(found, Source) != bool(spec.raw):
        rule = "is built in and takes no raw files" if spec.raw else "needs raw files"
        fix = "Omit them." if spec.raw else "Give at least one path."
        raise ConfigError(f"converter {spec.converter} of domain {spec.domain}", rule, fix)
    if spec.fields and spec.converter not in ("generic", "jsonl", "text"):
        rule = "has fixed fields; a field map is for the generic converter"
        raise ConfigError(f"converter {spec.converter} of domain {spec.domain}", rule, "Omit --fields.")
    if spec.fields:
        field_map_converter(dict(spec.fields))  # raises for unknown field names
    if spec.form and spec.form not in (*FORMS, "auto"):
        rule = f"the forms are {', '.join(FORMS)} and auto"
        raise ConfigError(f"form {spec.form!r} of domain {spec.domain}", rule, "Omit it.")
    if spec.cleaning.near_duplicates is not None:
        require_datasketch()
    check_template(spec.compose)
    spec.new_fault_log()  # raises for invalid error settings
    if spec.limits.max_record_bytes < 1 or spec.limits.max_expansion < 1:
        raise ConfigError(f"limits of {spec.domain}", "must be at least 1", "Omit them.")
