"""What a build is asked to do: the sources, and how each is read, cleaned and cut."""

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
from z2all_ds.corpus.compose import check_template
from z2all_ds.corpus.converters import BuiltIn, Source, field_map_converter, find_converter, load_plugin
from z2all_ds.corpus.converters.builtin import CHINESE_TEXTS
from z2all_ds.corpus.faults import FaultLog
from z2all_ds.corpus.forms import FORMS, ReadLimits
from z2all_ds.corpus.manifest import FORMAT_VERSION

MAX_SHARD_BYTES = 200_000_000
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class SourceSpec:
    """One domain of the corpus and where its text comes from."""

    domain: str
    converter: str
    raw: tuple[Path, ...] = ()
    """Files, folders or patterns; none for a built-in converter."""
    max_bytes: int | None = None
    """Limit of the JSON bytes of the domain; whole documents from all over the source are taken up to it."""
    form: str = ""
    """How the raw files are to be read, if not as the converter says."""
    fields: tuple[tuple[str, str], ...] = ()
    """For the generic converter: (field of the record, field of the raw data)."""
    compose: str = ""
    """Template of the content, e.g. "{title}\\n{content}"; empty leaves it as it is."""
    cleaning: CleaningRules = field(default_factory=CleaningRules)
    on_error: str = "stop"
    max_bad_share: float = 0.01
    limits: ReadLimits = field(default_factory=ReadLimits)
    plugin: Path | None = None
    """Python file that registers the converter."""

    def found_converter(self) -> Source | BuiltIn:
        """The converter, after the plugin that may bring it."""
        if self.plugin is not None:
            load_plugin(self.plugin)
        return find_converter(self.converter)

    def new_log(self) -> FaultLog:
        return FaultLog(self.on_error, self.max_bad_share)

    def output_key(self) -> list[object]:
        """All that decides what one row becomes. How errors are met is not of it: it decides whether there is a row."""
        found = self.found_converter()
        parts: list[object] = [FORMAT_VERSION, self.domain, found.name, found.revision, self.form, self.fields]
        parts += [self.compose, asdict(self.cleaning), asdict(self.limits)]
        if isinstance(found, BuiltIn):  # the text lies in this Python and in the shipped file
            parts += [self.max_bytes, platform.python_version()]
            parts.append(hashlib.sha256(CHINESE_TEXTS.read_bytes()).hexdigest())
        if self.plugin is not None:
            parts.append(hashlib.sha256(self.plugin.read_bytes()).hexdigest())
        return parts


def hashed(parts: object) -> str:
    """A short name for a list of plain values."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def check_sources(sources: Sequence[SourceSpec], max_shard_bytes: int) -> None:
    """Everything that can be seen to be senseless before a byte is read."""
    if not sources:
        raise ConfigError("sources", "a corpus needs at least one", "Name a domain and its converter.")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes {max_shard_bytes}", "must be positive", f"Leave it at {MAX_SHARD_BYTES}.")
    seen: set[str] = set()
    for spec in sources:
        _check_one(spec)
        if spec.domain in seen:
            fix = "Give the second one a name of its own, or all raw files to one source."
            raise ConfigError(f"domain {spec.domain!r}", "named by two sources", fix)
        seen.add(spec.domain)


def _check_one(spec: SourceSpec) -> None:
    if not _DOMAIN.fullmatch(spec.domain):
        raise ConfigError(f"domain {spec.domain!r}", "it becomes a file name", "Use letters, digits, _, - and dots.")
    if spec.max_bytes is not None and spec.max_bytes < 1:
        what = f"max_bytes {spec.max_bytes} of {spec.domain}"
        raise ConfigError(what, "must be positive", "Leave it out to take everything.")
    found = spec.found_converter()
    if isinstance(found, Source) != bool(spec.raw):
        rule = "is built in and takes no raw files" if spec.raw else "needs raw files"
        fix = "Leave them out." if spec.raw else "Give at least one path."
        raise ConfigError(f"converter {spec.converter} of domain {spec.domain}", rule, fix)
    if spec.fields and spec.converter not in ("generic", "jsonl", "text"):
        rule = "knows its fields; a field map is for the generic converter"
        raise ConfigError(f"converter {spec.converter} of domain {spec.domain}", rule, "Leave --fields out.")
    if spec.fields:
        field_map_converter(dict(spec.fields))  # refuses names that a record does not have
    if spec.form and spec.form not in (*FORMS, "auto"):
        rule = f"the forms are {', '.join(FORMS)} and auto"
        raise ConfigError(f"form {spec.form!r} of domain {spec.domain}", rule, "Leave it out.")
    if spec.cleaning.near_duplicates is not None:
        require_datasketch()
    check_template(spec.compose)
    spec.new_log()  # refuses senseless error settings
    if spec.limits.max_record_bytes < 1 or spec.limits.max_expansion < 1:
        raise ConfigError(f"limits of {spec.domain}", "must be at least 1", "Leave them out.")
