"""Text to measure with, for those who bring none: what every machine has."""

from pathlib import Path

from z2all_ds.corpus import SourceSpec, build_corpus


def built_in_text(folder: Path, sample_bytes: int) -> str:
    """A corpus of code, English and Chinese, up to a third of `sample_bytes` of each; the folder, as text."""
    sources = [("code", "python_code"), ("en", "python_docstrings"), ("zh", "chinese_sample")]
    build_corpus(folder, [SourceSpec(name, converter, max_bytes=sample_bytes // 3) for name, converter in sources])
    return str(folder)
