import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.helpers.stores import flaky_store
from z2all_ds.base.errors import DataError
from z2all_ds.base.storage import folders
from z2all_ds.corpus.manifest import FORMAT_VERSION, Manifest, ShardInfo, load_manifest, write_manifest

A = ShardInfo("code-00000.jsonl", "code", 3, 100, "a" * 64)
B = ShardInfo("code-00001.jsonl", "code", 2, 50, "b" * 64)
Z = ShardInfo("zh-00000.jsonl", "zh", 9, 70, "c" * 64)
MANIFEST = Manifest(FORMAT_VERSION, (A, B, Z), {"code": "key"}, 14)


def test_a_manifest_is_written_and_loaded_without_leaving_temporary_files(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert load_manifest(tmp_path) == MANIFEST
    assert [p.name for p in tmp_path.iterdir()] == ["MANIFEST.json"]


def test_domains_have_the_totals_of_their_shards() -> None:
    assert MANIFEST.domains == {"code": (5, 150), "zh": (9, 70)}


def test_fingerprint_depends_on_text_and_order() -> None:
    parts = [["code", "a" * 64, 3], ["code", "b" * 64, 2], ["zh", "c" * 64, 9]]
    assert MANIFEST.fingerprint == hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    same = [
        replace(MANIFEST, shards=(Z, A, B)),  # the order of domains does not matter
        replace(MANIFEST, build_keys={"code": "other"}),
        replace(MANIFEST, shards=(replace(A, path="moved/x.jsonl"), B, Z)),
    ]
    assert {m.fingerprint for m in same} == {MANIFEST.fingerprint}
    other = [
        replace(MANIFEST, shards=(B, A, Z)),  # the order within a domain does matter
        replace(MANIFEST, shards=(A, B)),
        replace(MANIFEST, shards=(replace(A, sha256="d" * 64), B, Z)),
        replace(MANIFEST, shards=(replace(A, domain="en"), B, Z)),
        replace(MANIFEST, shards=(replace(A, documents=4), B, Z)),
    ]
    assert len({m.fingerprint for m in [*other, MANIFEST]}) == len(other) + 1


def test_a_missing_manifest_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file.*Give the folder of a complete corpus"):
        load_manifest(tmp_path / "nowhere")


def test_domain_fingerprints_depend_only_on_the_text_of_the_domain() -> None:
    first = hashlib.sha256(json.dumps([["a" * 64, 3], ["b" * 64, 2]]).encode()).hexdigest()
    second = hashlib.sha256(json.dumps([["c" * 64, 9]]).encode()).hexdigest()
    assert MANIFEST.domain_fingerprints == {"code": first, "zh": second}
    empty = ShardInfo("code-00002.jsonl", "code", 0, 0, "e" * 64)
    same = [
        replace(MANIFEST, shards=(Z, A, B)),
        replace(MANIFEST, shards=(replace(A, path="moved/x.jsonl"), B, Z)),
        replace(MANIFEST, shards=(A, empty, B, Z, replace(empty, domain="empty"))),
    ]
    assert all(manifest.domain_fingerprints == MANIFEST.domain_fingerprints for manifest in same)
    other = [
        replace(MANIFEST, shards=(B, A, Z)),
        replace(MANIFEST, shards=(A, Z)),
        replace(MANIFEST, shards=(replace(A, sha256="d" * 64), B, Z)),
        replace(MANIFEST, shards=(replace(A, documents=4), B, Z)),
        replace(MANIFEST, text_field="title"),
    ]
    assert len({manifest.domain_fingerprints["code"] for manifest in [*other, MANIFEST]}) == len(other) + 1
    assert [manifest.domain_fingerprints["zh"] == second for manifest in other] == [True] * 4 + [False]


def test_a_different_text_field_changes_the_fingerprint(tmp_path: Path) -> None:
    titles = replace(MANIFEST, text_field="title")
    assert titles.fingerprint != MANIFEST.fingerprint
    write_manifest(tmp_path, titles)
    assert load_manifest(tmp_path) == titles


def test_the_text_field_is_optional_in_the_file(tmp_path: Path) -> None:
    values = asdict(MANIFEST)
    del values["text_field"]
    (tmp_path / "MANIFEST.json").write_text(json.dumps(values))
    assert load_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize("location", ["memory://manifests/a", "file://{}/b"])
def test_manifests_are_written_to_and_loaded_from_urls(tmp_path: Path, location: str) -> None:
    location = location.format(tmp_path)
    with pytest.raises(DataError, match=rf"{location}/MANIFEST.json: no such file"):
        load_manifest(location)
    write_manifest(location, MANIFEST)
    assert load_manifest(location) == MANIFEST


def test_store_errors_are_retried_and_then_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FIRST_WAIT_SECONDS", 0.001)
    with flaky_store() as store:
        write_manifest("flaky://c", MANIFEST)
        store.errors[:] = [OSError("connection lost")] * 4
        assert load_manifest("flaky://c") == MANIFEST
        store.errors[:] = [OSError("connection lost")] * 5
        with pytest.raises(DataError, match=r"flaky://c/MANIFEST\.json: cannot be read \(connection lost\)"):
            load_manifest("flaky://c")


SHARD = {"path": "a.jsonl", "domain": "d", "documents": 1, "bytes": 2, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not readable as JSON"),
        ("[]", "format_version None"),
        ('{"format_version": 99, "shards": []}', "format_version 99: this package reads version 1"),
        ('{"format_version": 1}', "not a manifest"),
        ('{"format_version": 1, "shards": [{}]}', "not a manifest"),
        (json.dumps({"format_version": 1, "shards": [{**SHARD, "path": "../x"}]}), "inside the corpus folder"),
        (json.dumps({"format_version": 1, "shards": [{**SHARD, "path": "/x"}]}), "inside the corpus folder"),
        (json.dumps({"format_version": 1, "shards": [{**SHARD, "documents": -1}]}), "not a count"),
        (json.dumps({"format_version": 1, "shards": [{**SHARD, "sha256": "no"}]}), "not a SHA-256"),
        (json.dumps({"format_version": 1, "shards": [SHARD, SHARD]}), "listed twice"),
        (json.dumps({"format_version": 1, "shards": [SHARD], "text_field": 3}), "text_field 3 must be"),
        (json.dumps({"format_version": 1, "shards": [SHARD], "text_field": ""}), "text_field '' must be"),
    ],
)
def test_invalid_manifests_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "MANIFEST.json").write_text(text)
    with pytest.raises(DataError, match=words):
        load_manifest(tmp_path)
