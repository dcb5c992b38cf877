"""A corpus of many short documents: lanes read blocks of several, and most are still unread after a hundred steps."""

from pathlib import Path
from typing import Any

from tests.data.tokens.text_corpora import write_text_corpus
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.corpus.reading.readers import open_domains

CHARACTERS_PER_DOCUMENT = 400
DOCUMENTS_PER_SHARD = 150


def write_short_documents(corpus: Path, folder: Path) -> Path:
    """Write a corpus with the text of another one, cut into short documents of the same domains; return its folder."""
    shards = {}
    for name, reader in open_domains(corpus, load_manifest(corpus)).items():
        text = "\n".join(reader.read(number) for number in range(reader.num_documents))
        documents = _pieces(text, CHARACTERS_PER_DOCUMENT)
        shards[name] = _pieces(documents, DOCUMENTS_PER_SHARD)
    return write_text_corpus(folder, shards)


def _pieces(whole: Any, size: int) -> list[Any]:
    """Split a text or a list into pieces of `size`."""
    return [whole[begin : begin + size] for begin in range(0, len(whole), size)]
