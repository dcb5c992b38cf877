"""A build's report in words: short after the build, whole on request."""

from collections.abc import Iterator
from typing import Any

from z2all_ds.base.console import human_bytes
from z2all_ds.corpus.cleaning import CleaningReport
from z2all_ds.corpus.faults import KINDS


def summary_lines(report: dict[str, Any]) -> Iterator[str]:
    """What came out, and one line for each thing that was lost on the way."""
    yield f"{report['domain']}: {report['documents']:,} documents, {human_bytes(report['bytes'])}"
    for kind, count in report["faults"]["counts"].items():
        first = report["faults"]["samples"][kind][0]
        yield f"  {count:,} x {KINDS[kind]}, e.g. {first}"
    for rule, counts in CleaningReport.from_json(report["cleaning"]).rules.items():
        if rule in report["dropped"]:  # decided later, over all documents
            continue
        did = []
        if counts.records_changed:
            did.append(f"{counts.records_changed:,} documents changed, {human_bytes(counts.bytes_removed)} removed")
        if counts.records_dropped:
            did.append(f"{counts.records_dropped:,} documents dropped, {human_bytes(counts.bytes_dropped)}")
        yield f"  {rule}: {', '.join(did) or 'nothing to do'}"
    for rule in report["cleaning"]["not_applied_to_code"]:
        yield f"  {rule}: not applied, code is never altered"
    for step, dropped in report["dropped"].items():
        yield f"  {step}: {dropped['documents']:,} documents dropped, {human_bytes(dropped['bytes'])}"


def full_lines(report: dict[str, Any]) -> Iterator[str]:
    """The summary, then every sample that was kept."""
    yield from summary_lines(report)
    for kind, samples in report["faults"]["samples"].items():
        for sample in samples:
            yield f"    {kind}: {sample}"
    for rule, counts in CleaningReport.from_json(report["cleaning"]).rules.items():
        for sample in counts.samples:
            yield f"    {rule}: {sample}"
    for step, dropped in report["dropped"].items():
        for sample in dropped["samples"]:
            yield f"    {step}: {sample}"
