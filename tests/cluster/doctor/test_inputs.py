"""Tests of the checks of a run config's inputs: each problem is one finding."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.training import run_arguments
from z2all_ds.base.config import load_run_config
from z2all_ds.base.errors import DataError
from z2all_ds.cluster.doctor import Finding, examine_run
from z2all_ds.cluster.doctor.inputs import shards_of
from z2all_ds.corpus.adopt import adopt_corpus
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.data.tokens.tokenizing import tokenize_corpus


def found(corpus: Path, tokenizer: Path, *overrides: str) -> list[Finding]:
    return examine_run(load_run_config(None, run_arguments(corpus / "runs", corpus, tokenizer, *overrides)))


def not_ok(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status != "ok"]


@pytest.fixture
def own_corpus(small_corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_corpus, tmp_path / "corpus"))


def test_valid_inputs_have_no_problems(small_corpus: Path, small_tokenizer: Path) -> None:
    findings = found(small_corpus, small_tokenizer)
    assert [finding.name for finding in findings] == ["tokenizer", "data", "shards", "DeepSpeed JSON"]
    assert not_ok(findings) == []
    assert findings[0].value == "1,012 ids for model.vocab_size=1,024"


def test_a_too_large_tokenizer_is_a_failure_and_a_much_too_small_one_a_warning(
    small_corpus: Path, small_tokenizer: Path
) -> None:
    (failure,) = not_ok(found(small_corpus, small_tokenizer, "model.vocab_size=512"))
    assert failure.name.startswith("tokenizer ") and failure.status == "fail"
    assert failure.fix == "Set model.vocab_size to auto, or to 1024 or more."
    (wasteful,) = not_ok(found(small_corpus, small_tokenizer, "model.vocab_size=2048"))
    assert (wasteful.name, wasteful.status) == ("tokenizer", "warn") and "model.vocab_size=1024" in wasteful.fix


def test_a_missing_tokenizer_is_reported_once(small_corpus: Path, tmp_path: Path) -> None:
    (failure,) = not_ok(found(small_corpus, tmp_path / "none"))
    assert failure.status == "fail" and str(tmp_path / "none") in failure.name


def test_a_missing_corpus_and_an_unknown_deepspeed_json_are_failures(small_tokenizer: Path, tmp_path: Path) -> None:
    gone, unknown = not_ok(found(tmp_path / "nowhere", small_tokenizer, "deepspeed=zero7"))
    assert (gone.status, unknown.status) == ("fail", "fail")
    assert "nowhere" in gone.name and "zero7" in unknown.name


def test_truncated_and_missing_shards_are_one_failure(own_corpus: Path, small_tokenizer: Path) -> None:
    first, second = sorted(own_corpus.glob("*.jsonl"))[1:3]
    first.write_bytes(first.read_bytes()[:-100])
    (failure,) = not_ok(found(own_corpus, small_tokenizer))
    size = first.stat().st_size
    assert failure.name == str(first)
    assert failure.value == f"the shard has {size:,} bytes, but the manifest says {size + 100:,}"
    assert f"`z2all corpus audit {own_corpus}`" in failure.fix
    second.unlink()
    (failure,) = not_ok(found(own_corpus, small_tokenizer))
    files = len(load_manifest(own_corpus).shards)
    assert failure.name == str(first) and f"; 1 more of {files} files are damaged" in failure.value
    first.unlink()
    (failure,) = not_ok(found(own_corpus, small_tokenizer))
    assert failure.value.startswith("the shard cannot be read (No such file or directory)")


def test_held_out_shards_are_checked(small_corpus: Path, own_corpus: Path, small_tokenizer: Path) -> None:
    shard = sorted(own_corpus.glob("*.jsonl"))[0]
    shard.unlink()
    held_out = (f"validation.corpus={own_corpus}", "validation.samples=8")
    (failure,) = not_ok(found(small_corpus, small_tokenizer, *held_out))
    assert failure.name == str(shard)


@pytest.mark.parametrize("suffix", [".tokens", ".ends"])
def test_a_truncated_file_of_a_tokenized_corpus_is_a_failure(
    suffix: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    tokenize_corpus(small_corpus, small_tokenizer, tmp_path)
    assert not_ok(found(tmp_path, small_tokenizer)) == []
    file = sorted(tmp_path.glob(f"*{suffix}"))[-1]
    file.write_bytes(file.read_bytes()[:-2])
    (failure,) = not_ok(found(tmp_path, small_tokenizer))
    assert failure.name == str(file) and "z2all corpus tokenize" in failure.fix


def test_a_truncated_shard_of_an_adopted_parquet_corpus_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"text": ["some words"] * 50})
    for name in ("a", "b"):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    adopt_corpus(tmp_path, text_field="text")
    assert shards_of(str(tmp_path)).status == "ok"
    data = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(data[:-10])
    with pytest.raises(DataError, match=r"b\.parquet: the shard is truncated.*z2all corpus adopt"):
        shards_of(str(tmp_path))


def test_shards_in_an_object_store_are_skipped() -> None:
    assert shards_of("memory://nothing/there").status == "ok"


def test_nvme_offload_without_libaio_is_a_failure(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linker = tmp_path / "c++"
    linker.write_text("#!/bin/sh\necho 'cannot find -laio' >&2\nexit 1\n")
    linker.chmod(0o755)
    monkeypatch.setenv("CXX", str(linker))
    overrides = ("deepspeed=zero3_nvme", f"train.nvme_folder={tmp_path}")
    (failure,) = not_ok(found(small_corpus, small_tokenizer, *overrides))
    assert (failure.name, failure.status) == ("offload to nvme", "fail") and "libaio-dev" in failure.fix
