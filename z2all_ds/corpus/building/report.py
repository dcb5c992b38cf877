"""Reports of a build: counts, locations and samples for each domain, stored in the corpus folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from z2all_ds.base.console import human_bytes
from z2all_ds.base.errors import DataError
from z2all_ds.base.foreign_content import explain_content
from z2all_ds.base.json_text import load_json
from z2all_ds.base.storage.open_files import read_regular
from z2all_ds.corpus.cleaning import CleaningReport
from z2all_ds.corpus.faults import KINDS

REPORTS_NAME = "reports"


def report_file(corpus_dir: Path, domain: str) -> Path:
    return corpus_dir / REPORTS_NAME / _plain_name(f"{domain}.json")


def keys_file(corpus_dir: Path, domain: str) -> Path:
    """Return the path of the content keys of a domain; the file exists if exact duplicates were removed."""
    return corpus_dir / REPORTS_NAME / _plain_name(f"{domain}.keys")


def _plain_name(name: str) -> str:
    """Refuse a domain of a manifest whose report would be outside the corpus."""
    if Path(name).name != name:
        raise DataError(f"domain {Path(name).with_suffix('')}", "is not a plain name", "Build the corpus again.")
    return name


def read_report(corpus_dir: str | Path, domain: str) -> dict[str, Any]:
    """Read the report of a domain."""
    path, fix = report_file(Path(corpus_dir), domain), "Build the domain again to get its report."
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(str(path), f"not readable ({error})", fix) from None
    with explain_content(DataError, str(path), "not readable", fix):
        values: dict[str, Any] = load_json(content)
        _ = list(full_lines(values))  # raises if a value is missing or has a wrong type
    return values


def is_report(path: Path, domain: str) -> bool:
    """Return whether a file is the report of a build for the domain."""
    try:
        return bool(read_report(path.parent.parent, domain)["domain"] == domain)
    except DataError:
        return False


def summary_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the size of the domain, and one line per kind of invalid row and per cleaning step."""
    yield f"{report['domain']}: {report['documents']:,} documents, {human_bytes(report['bytes'])}"
    for kind, count in report["faults"]["counts"].items():
        first = report["faults"]["samples"][kind][0]
        yield f"  {count:,} x {KINDS[kind]}, e.g. {first}"
    for rule, counts in CleaningReport.from_json(report["cleaning"]).rules.items():
        if rule in report["dropped"]:  # listed below, with the counts of the whole domain
            continue
        effects = []
        if counts.records_changed:
            effects.append(f"{counts.records_changed:,} documents changed, {human_bytes(counts.bytes_removed)} removed")
        if counts.records_dropped:
            effects.append(f"{counts.records_dropped:,} documents dropped, {human_bytes(counts.bytes_dropped)}")
        yield f"  {rule}: {', '.join(effects) or 'no effect'}"
    for rule in report["cleaning"]["not_applied_to_code"]:
        yield f"  {rule}: not applied, code is never altered"
    for step, dropped in report["dropped"].items():
        yield f"  {step}: {dropped['documents']:,} documents dropped, {human_bytes(dropped['bytes'])}"


def full_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the summary and every stored sample."""
    yield from summary_lines(report)
    samples = dict(report["faults"]["samples"])
    samples |= {rule: counts["samples"] for rule, counts in report["cleaning"]["rules"].items()}
    for name, some in samples.items():
        yield from (f"    {name}: {sample}" for sample in some)
    for step, dropped in report["dropped"].items():
        yield from (f"    {step}: {sample}" for sample in dropped["samples"])
