"""Tests for TOKENS.json: round trips and invalid content."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.tokens.text_corpora import write_token_corpus
from z2all_ds.base.errors import DataError
from z2all_ds.data.tokens.manifest import DomainTotals, dtype_for, files_of, write_token_manifest
from z2all_ds.data.tokens.reading import load_token_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_token_corpus(tmp_path / "t", [[[1, 2, 9], [9], [3, 4, 5, 9], [6, 9]], [[7, 9]]], 9, 10)


def test_a_manifest_is_unchanged_by_a_round_trip(folder: Path) -> None:
    before = (folder / "TOKENS.json").read_bytes()
    manifest = load_token_manifest(folder)
    assert [shard.tokens for shard in manifest.shards] == [10, 2]
    assert manifest.totals == {"d": DomainTotals(documents=5, tokens=12, text_bytes=100, bytes_per_token=100 / 7)}
    write_token_manifest(folder, manifest)
    assert (folder / "TOKENS.json").read_bytes() == before


def test_the_narrowest_dtype_is_chosen() -> None:
    assert [dtype_for(size) for size in (1, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def test_file_names_are_unique() -> None:
    names = [name for raw in ("a.jsonl", "a.parquet", "a", "a.tokens", "b/a.jsonl") for name in files_of(raw)]
    assert len(set(names)) == 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda values: values.update(format_version=2),
            "format_version: not a valid token manifest (Input should be 1)",
        ),
        (lambda values: values.pop("shards"), "shards: not a valid token manifest (Field required)"),
        (
            lambda values: values.update(dtype="int8"),
            "dtype: not a valid token manifest (Input should be 'uint16' or 'uint32')",
        ),
        (lambda values: values.update(eot_id=10), "eot_id 10 of 10 ids as uint16"),
        (lambda values: values.update(tokenizer_size=65537), "eot_id 9 of 65537 ids as uint16"),
        (lambda values: values.update(domain_fingerprints={}), "domain 'd' has no fingerprint"),
        (lambda values: values.update(extra=1), "extra: not a valid token manifest (Unexpected keyword argument)"),
        (lambda values: values["shards"].append(values["shards"][0]), "a shard is listed twice"),
        (lambda values: values["shards"][0].update(tokens_file="../x"), "'../x' must be inside the folder"),
        (lambda values: values["shards"][0].update(ends_file="/x"), "'/x' must be inside the folder"),
        (
            lambda values: values["shards"][0].update(tokens=-1),
            "shards, 0, tokens: not a valid token manifest (Input should be greater than or equal to 0)",
        ),
        (lambda values: values["shards"][0].update(documents=99), "99 documents cannot have 10 tokens"),
        (
            lambda values: values["shards"][0].update(ends_sha256="x"),
            "ends_sha256: not a valid token manifest (String should match pattern",
        ),
    ],
)
def test_invalid_manifests_are_refused(folder: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = folder / "TOKENS.json"
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DataError) as caught:
        load_token_manifest(folder)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_invalid_json_is_refused(folder: Path) -> None:
    (folder / "TOKENS.json").write_bytes(b'{"format_version": 1, "sha')
    with pytest.raises(DataError, match=r"TOKENS\.json: not a valid token manifest \(Invalid JSON"):
        load_token_manifest(folder)
