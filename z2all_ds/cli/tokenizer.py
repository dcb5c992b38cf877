"""The verbs of `z2all tokenizer`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_report
from z2all_ds.cli.options import JsonOption

tokenizer_app = typer.Typer(no_args_is_help=True, help="A vocabulary from text, as a Hugging Face folder.")

InputsArgument = Annotated[list[str], typer.Argument(help="A corpus folder, or files: PATH or NAME=PATH.")]
OutOption = Annotated[Path, typer.Option(help="Tokenizer folder.")]
SafeOption = Annotated[
    bool,
    typer.Option("--safe-by-default", help="Plain transformers, too, reads spelled-out control tokens as text."),
]


@tokenizer_app.command("train")
def tokenizer_train(
    inputs: InputsArgument,
    out: OutOption,
    algorithm: Annotated[
        str, typer.Option(help="bbpe (byte-level BPE) or spm (SentencePiece, byte fallback).")
    ] = "bbpe",
    vocab_size: Annotated[int, typer.Option(help="Text tokens; 12 control tokens come after them.")] = 64000,
    weights: Annotated[str, typer.Option(help="Part of each domain, e.g. zh=0.5,en=0.3,code=0.2.")] = "",
    max_bytes: Annotated[
        int | None, typer.Option(help="Read at most so much text (default: 1 GB, spm 500 MB).")
    ] = None,
    safe_by_default: SafeOption = False,
) -> None:
    """Train a tokenizer on a corpus or on files."""
    from z2all_ds.tokenizer import padded_vocabulary, train_tokenizer
    from z2all_ds.tokenizer.sampling import parse_weights

    report = train_tokenizer(
        inputs,
        out,
        vocab_size,
        max_bytes,
        algorithm=algorithm,
        weights=parse_weights(weights) if weights else None,
        safe_by_default=safe_by_default,
    )
    print(f"{report.folder}: {report.size:,} ids")
    for domain, bytes_per_token in report.bytes_per_token.items():
        print(f"{domain}: {bytes_per_token:.2f} bytes per token")
    print(f"a model for it: model.vocab_size={padded_vocabulary(report.size)}")


@tokenizer_app.command("import")
def tokenizer_import(
    file: Annotated[Path, typer.Argument(help="tokenizer.json, a Hugging Face folder, or a SentencePiece .model.")],
    out: OutOption,
    special: Annotated[list[str] | None, typer.Option(help="NAME=ID of a control token; may be repeated.")] = None,
    special_start: Annotated[int | None, typer.Option(help="First id of the other control tokens.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse what cannot give every text back.")] = False,
    safe_by_default: SafeOption = False,
) -> None:
    """Adopt a tokenizer that exists already; its ids stay, the control tokens are added."""
    from z2all_ds.tokenizer import import_tokenizer
    from z2all_ds.tokenizer.import_existing import parse_special_ids

    report = import_tokenizer(
        file,
        out,
        special_ids=parse_special_ids(special or []),
        special_start=special_start,
        strict=strict,
        safe_by_default=safe_by_default,
    )
    print(f"{report.folder}: {report.text_vocab_size:,} ids of its own, {report.size:,} with the control tokens")
    for name, number in report.special_ids.items():
        print(f"{number} {name}")


@tokenizer_app.command("report")
def tokenizer_report(
    folders: Annotated[list[Path], typer.Argument(help="Tokenizer folders, side by side.")],
    corpus: Annotated[list[str], typer.Option(help="Corpus folder; or files, each as an option of its own.")],
    as_json: JsonOption = False,
) -> None:
    """How well tokenizers pack each domain, numbers, indentation and Chinese, and whether text comes back."""
    from z2all_ds.tokenizer import report as room

    print_report(room.report_tokenizers(folders, corpus), as_json, room.describe)
