"""The verbs of `z2all tokenizer`."""

from pathlib import Path
from typing import Annotated

import typer

tokenizer_app = typer.Typer(no_args_is_help=True, help="Vocabulary from a corpus.")


@tokenizer_app.command("train")
def tokenizer_train(
    corpus: Annotated[Path, typer.Argument(help="Corpus folder.")],
    out: Annotated[Path, typer.Option(help="Tokenizer folder.")],
    vocab_size: Annotated[int, typer.Option(help="Text tokens; 12 special ones come after them.")] = 64000,
    max_bytes: Annotated[int, typer.Option(help="Read at most so much text, spread over the domains.")] = 200_000_000,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus."""
    from z2all_ds.tokenizer import train_tokenizer

    report = train_tokenizer(corpus, out, vocab_size, max_bytes)
    print(f"{report.folder}: {report.size:,} ids")
    for domain, bytes_per_token in report.bytes_per_token.items():
        print(f"{domain}: {bytes_per_token:.2f} bytes per token")
