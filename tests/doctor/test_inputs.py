"""The inputs of a run config, as the doctor tells of them."""

from pathlib import Path

from tests.helpers.training import run_arguments
from z2all_ds.config import load_run_config
from z2all_ds.doctor import Finding, examine_further


def found(run_dir: Path, corpus: Path, tokenizer: Path, *overrides: str) -> dict[str, Finding]:
    run = load_run_config(None, run_arguments(run_dir, corpus, tokenizer, *overrides))
    return {finding.name: finding for finding in examine_further(run_dir, run)}


def test_all_is_well(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    findings = found(tmp_path, small_corpus, small_tokenizer)
    assert findings["tokenizer"].value == "1,012 ids for model.vocab_size=1,024"
    assert {findings[name].status for name in ("tokenizer", "data", "DeepSpeed JSON")} == {"ok"}


def test_a_tokenizer_that_is_too_large_or_much_too_small(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    findings = found(tmp_path, small_corpus, small_tokenizer, "model.vocab_size=512")
    (failure,) = [finding for name, finding in findings.items() if name.startswith("tokenizer ")]
    assert failure.status == "fail" and failure.fix == "Set model.vocab_size to 1024 or more."
    wasteful = found(tmp_path, small_corpus, small_tokenizer, "model.vocab_size=2048")["tokenizer"]
    assert wasteful.status == "warn" and "model.vocab_size=1024" in wasteful.fix


def test_a_corpus_that_is_gone_and_a_json_that_is_none(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    findings = found(tmp_path, tmp_path / "nowhere", small_tokenizer, "deepspeed=zero7")
    assert [finding.status for finding in findings.values()].count("fail") == 2
    assert any("nowhere" in name for name in findings) and any("zero7" in name for name in findings)
