"""Data for benchmark and comparison runs without a configured corpus: text that every machine has."""

from pathlib import Path

from z2all_ds.base.config import load_run_config
from z2all_ds.corpus import SourceSpec, build_corpus
from z2all_ds.tokenizer import train_tokenizer

CORPUS_BYTES = 5_000_000
TEXT_VOCAB_SIZE = 2048


def prepare_data(config: str | None, overrides: list[str], folder: Path) -> list[str]:
    """Return overrides for a corpus and a tokenizer built from such text; empty if a corpus is configured."""
    if load_run_config(config, overrides).data.corpus:
        return []
    build_corpus(folder / "corpus", [SourceSpec("code", "python_code", max_bytes=CORPUS_BYTES)])
    train_tokenizer(folder / "corpus", folder / "tokenizer", TEXT_VOCAB_SIZE, CORPUS_BYTES)
    return [f"data.corpus={folder / 'corpus'}", f"data.tokenizer={folder / 'tokenizer'}"]
