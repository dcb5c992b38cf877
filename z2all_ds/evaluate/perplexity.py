"""Perplexity of an exported model on a corpus, per domain.

Each document is read alone, in windows of the model's length without overlap; every token but the first of a window
is predicted. Bits per byte divide by the text's bytes, so that models with different tokenizers can be compared.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch.nn import functional

from z2all_ds.console import progress
from z2all_ds.corpus.manifest import load_manifest
from z2all_ds.data.order import permuted_index
from z2all_ds.data.raw.readers import open_domains
from z2all_ds.errors import ConfigError
from z2all_ds.evaluate.loading import load_folder

ORDER_SEED = 0
"""The documents looked at are the first of the domain in this shuffle: the same ones every time."""


@dataclass(frozen=True)
class PerplexityRow:
    """One domain's figures."""

    domain: str
    documents: int
    tokens: int
    loss: float
    """Nats per predicted token."""
    perplexity: float
    bits_per_byte: float


def measure_perplexity(folder: Path, corpus_dir: Path, documents_per_domain: int) -> list[PerplexityRow]:
    """Rows in the order of the corpus's domains."""
    if documents_per_domain < 1:
        raise ConfigError(f"documents={documents_per_domain}", "must be at least 1", "Give a larger number.")
    model, tokenizer, device = load_folder(folder)
    window = model.config.max_position_embeddings
    domains = open_domains(corpus_dir, load_manifest(corpus_dir))
    counts = {name: min(documents_per_domain, reader.num_documents) for name, reader in domains.items()}
    rows = []
    with progress("perplexity", sum(counts.values()), "documents") as advance:
        for name, reader in domains.items():
            nats, tokens, bytes_read = 0.0, 0, 0
            for position in range(counts[name]):
                text = reader.read(permuted_index(position, reader.num_documents, ORDER_SEED, 0, name))
                ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                for start in range(0, len(ids), window):
                    piece = torch.tensor([ids[start : start + window]], device=device)
                    if piece.shape[1] > 1:
                        with torch.no_grad():
                            logits = model(piece).logits[0, :-1].float()
                        nats += functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
                        tokens += piece.shape[1] - 1
                bytes_read += len(text.encode())
                advance(1)
            loss = nats / max(1, tokens)
            bits = nats / math.log(2) / max(1, bytes_read)
            rows.append(PerplexityRow(name, counts[name], tokens, loss, math.exp(loss), bits))
    return rows


def to_json(rows: list[PerplexityRow]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False)


def render(rows: list[PerplexityRow], file: TextIO | None = None) -> None:
    """A table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table("domain", "documents", "tokens", "loss", "perplexity", "bits/byte")
    for row in rows:
        figures = (f"{row.loss:.4f}", f"{row.perplexity:.2f}", f"{row.bits_per_byte:.4f}")
        table.add_row(row.domain, str(row.documents), f"{row.tokens:,}", *figures)
    Console(file=file, highlight=False).print(table)
