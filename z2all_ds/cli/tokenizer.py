"""The verbs of `z2all tokenizer`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.base.reports import print_lines, print_report
from z2all_ds.cli.options import JsonOption
from z2all_ds.cli.verbs import Verbs

tokenizer_app = Verbs(no_args_is_help=True, help="Train, import and compare tokenizers.")

InputsArgument = Annotated[list[str], typer.Argument(help="Corpus folder, or files: PATH or NAME=PATH.")]
OutOption = Annotated[Path, typer.Option(help="Output tokenizer folder.")]
SafeOption = Annotated[
    bool,
    typer.Option("--safe-by-default", help="Make plain transformers also encode control tokens in text as plain text."),
]


@tokenizer_app.command("train")
def tokenizer_train(
    inputs: InputsArgument,
    out: OutOption,
    algorithm: Annotated[
        str, typer.Option(help="bbpe (byte-level BPE) or spm (SentencePiece with byte fallback).")
    ] = "bbpe",
    split: Annotated[
        str | None,
        typer.Option(
            help="How bbpe splits text before merging: by_script (default), llama3, qwen2, gpt2, or four_characters "
            "(the earlier default)."
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Number of text tokens; 12 control tokens follow them.")] = 64000,
    weights: Annotated[str, typer.Option(help="Share of each domain, e.g. zh=0.5,en=0.3,code=0.2.")] = "",
    max_bytes: Annotated[
        int | None, typer.Option(help="Maximum bytes of text to read (default: 1 GB, spm 500 MB).")
    ] = None,
    safe_by_default: SafeOption = False,
) -> None:
    """Train a tokenizer on a corpus or on files."""
    from z2all_ds.tokenizer import train_tokenizer
    from z2all_ds.tokenizer.sampling import parse_weights

    report = train_tokenizer(
        inputs,
        out,
        vocab_size,
        max_bytes,
        algorithm=algorithm,
        split=split,
        weights=parse_weights(weights) if weights else None,
        safe_by_default=safe_by_default,
    )
    print_lines([f"{report.folder}: {report.size:,} ids"])
    print_lines(f"{domain}: {ratio:.2f} bytes per token" for domain, ratio in report.bytes_per_token.items())
    print_lines(["for a model with this tokenizer: model.vocab_size=auto"])


@tokenizer_app.command("import")
def tokenizer_import(
    file: Annotated[Path, typer.Argument(help="tokenizer.json, a Hugging Face folder, or a SentencePiece .model.")],
    out: OutOption,
    special: Annotated[list[str] | None, typer.Option(help="NAME=ID of a control token; may be repeated.")] = None,
    special_start: Annotated[int | None, typer.Option(help="First id of the other control tokens.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a tokenizer that cannot reproduce every text.")
    ] = False,
    safe_by_default: SafeOption = False,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Add no control tokens; documents end with its own end-of-text token.")
    ] = False,
    eos: Annotated[str, typer.Option(help="As it is, but end documents with this token of it.")] = "",
) -> None:
    """Import an existing tokenizer: its ids do not change, the control tokens are added (see --as-is).

    A Hugging Face folder with a tokenizer.json needs no import: it can be a data.tokenizer as it is.
    """
    from z2all_ds.tokenizer import import_tokenizer
    from z2all_ds.tokenizer.import_existing import parse_special_ids

    report = import_tokenizer(
        file,
        out,
        special_ids=parse_special_ids(special or []),
        special_start=special_start,
        strict=strict,
        safe_by_default=safe_by_default,
        as_is=as_is,
        eos=eos,
    )
    sizes = f"{report.text_vocab_size:,} original ids, {report.size:,} with the control tokens"
    print_lines([f"{report.folder}: {sizes}", *(f"{number} {name}" for name, number in report.special_ids.items())])


@tokenizer_app.command("report")
def tokenizer_report(
    folders: Annotated[list[Path], typer.Argument(help="Tokenizer folders to compare.")],
    corpus: Annotated[list[str], typer.Option(help="Corpus folder, or files; may be repeated.")],
    as_json: JsonOption = False,
) -> None:
    """Compare compression of each domain, numbers, indentation and Chinese, and check that text round-trips."""
    from z2all_ds.tokenizer import report as impl

    print_report(impl.report_tokenizers(folders, corpus), as_json, impl.describe)
