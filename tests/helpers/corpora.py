"""A small real corpus (half a megabyte of the built-in sources) and a small real tokenizer, made in two seconds."""

from pathlib import Path

from z2all_ds.corpus import Manifest, SourceSpec, build_corpus
from z2all_ds.tokenizer import TokenizerReport, train_tokenizer

SMALL_SOURCES = (
    SourceSpec("code", "python_code", max_bytes=300_000),
    SourceSpec("en", "python_docstrings", max_bytes=150_000),
    SourceSpec("zh", "chinese_sample", max_bytes=150_000),
)
SMALL_TEXT_VOCAB = 1000


def build_small_corpus(out_dir: Path) -> Manifest:
    """Build a corpus of three domains, with code in several shards, so that shard boundaries occur."""
    return build_corpus(out_dir, SMALL_SOURCES, max_shard_bytes=120_000)


def train_small_tokenizer(corpus_dir: Path, out_dir: Path) -> TokenizerReport:
    """Train a tokenizer with 1000 text tokens and the control tokens: 1012 ids."""
    return train_tokenizer(corpus_dir, out_dir, SMALL_TEXT_VOCAB)
