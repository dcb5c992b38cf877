"""Text to measure and to compare with, for those who bring none: what every machine has."""

from pathlib import Path

from z2all_ds.config import load_run_config
from z2all_ds.corpus import SourceSpec, build_corpus
from z2all_ds.tokenizer import train_tokenizer

CORPUS_BYTES = 5_000_000
TEXT_VOCAB_SIZE = 2048


def built_in_text(folder: Path, sample_bytes: int) -> str:
    """A corpus of code, English and Chinese, up to a third of `sample_bytes` of each; the folder, as text."""
    sources = [("code", "python_code"), ("en", "python_docstrings"), ("zh", "chinese_sample")]
    build_corpus(folder, [SourceSpec(name, converter, max_bytes=sample_bytes // 3) for name, converter in sources])
    return str(folder)


def prepare_data(config: str | None, overrides: list[str], folder: Path) -> list[str]:
    """Overrides that name a corpus and a tokenizer made here of the text every machine has; none where one is named."""
    if load_run_config(config, overrides).data.corpus:
        return []
    build_corpus(folder / "corpus", [SourceSpec("code", "python_code", max_bytes=CORPUS_BYTES)])
    train_tokenizer(folder / "corpus", folder / "tokenizer", TEXT_VOCAB_SIZE, CORPUS_BYTES)
    return [f"data.corpus={folder / 'corpus'}", f"data.tokenizer={folder / 'tokenizer'}"]
