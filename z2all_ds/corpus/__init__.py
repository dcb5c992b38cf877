"""Turns raw text into shards of records with a manifest. Needs neither torch nor transformers.

`build_corpus` writes a corpus folder, `load_manifest` opens one, `audit_corpus` checks one. Raw data is read by
converters: functions from a row of raw data to a draft, registered under a name (see `converters/`).
"""

from typing import TYPE_CHECKING

from z2all_ds.base.lazy import lazy_names

if TYPE_CHECKING:
    from z2all_ds.corpus.audit import AuditReport, audit_corpus
    from z2all_ds.corpus.building.build import build_corpus
    from z2all_ds.corpus.building.report import read_report
    from z2all_ds.corpus.building.settings import SourceSpec
    from z2all_ds.corpus.executors import Executor
    from z2all_ds.corpus.manifest import Manifest, ShardInfo, load_manifest
    from z2all_ds.corpus.schema import Record, parse_record

__all__ = [
    "AuditReport",
    "Executor",
    "Manifest",
    "Record",
    "ShardInfo",
    "SourceSpec",
    "audit_corpus",
    "build_corpus",
    "load_manifest",
    "parse_record",
    "read_report",
]

__getattr__ = lazy_names(
    __name__,
    {
        "audit": "AuditReport audit_corpus",
        "building.build": "build_corpus",
        "building.report": "read_report",
        "building.settings": "SourceSpec",
        "executors": "Executor",
        "manifest": "Manifest ShardInfo load_manifest",
        "schema": "Record parse_record",
    },
)
