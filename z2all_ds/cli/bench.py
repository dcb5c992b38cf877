"""The verbs of `z2all bench`."""

from typing import Annotated

import typer

from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


@bench_app.command("step")
def bench_step(
    config: ConfigOption = None,
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine (default: its GPUs, or 1).")] = None,
    steps: Annotated[int, typer.Option(help="Steps to take; the second half is measured.")] = 20,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Time, tokens per second, MFU and peak memory of a training step."""
    from z2all_ds.bench.step import bench_step as measure
    from z2all_ds.bench.step import to_json, to_line

    costs = measure(config, overrides or [], ranks, steps)
    print(to_json(costs) if as_json else to_line(costs))


@bench_app.command("corpus")
def bench_corpus(
    megabytes: Annotated[int, typer.Option(help="Of text in each form.")] = 200,
    form: Annotated[list[str] | None, typer.Option(help="Only this form; may be given several times.")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Also with so many processes; may be repeated.")] = None,
    clean: Annotated[list[str] | None, typer.Option(help="Cleaning steps for --workers.")] = None,
    repeats: Annotated[int, typer.Option(help="Times to measure each; the middle one counts.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """MB/s per core and peak memory of converting raw data, for each form, beside orjson alone."""
    from z2all_ds.bench import corpus as room

    costs = room.bench_corpus(megabytes, form or [], workers or [], clean or [], repeats)
    if as_json:
        print(room.to_json(costs))
        return
    for line in room.to_lines(costs):
        print(line)


@bench_app.command("tokenizer")
def bench_tokenizer(
    inputs: Annotated[list[str] | None, typer.Argument(help="Corpus folder or files (default: built-in text).")] = None,
    sample_bytes: Annotated[int, typer.Option("--bytes", help="Text to train on.")] = 20_000_000,
    vocab_size: Annotated[int, typer.Option(help="Text tokens.")] = 16_000,
    weights: Annotated[str, typer.Option(help="Part of each domain, e.g. zh=0.3,en=0.4,code=0.3.")] = "",
    trainer: Annotated[list[str] | None, typer.Option(help="Only this trainer; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time and peak memory of training, beside the Hugging Face trainer with its default split, and encoding speed."""
    from z2all_ds.bench import tokenizer as room
    from z2all_ds.tokenizer.sampling import parse_weights

    chosen = {"names": trainer} if trainer else {}
    costs = room.bench_tokenizer(
        inputs or [], sample_bytes, vocab_size, parse_weights(weights) if weights else None, **chosen
    )
    print(room.to_json(costs) if as_json else room.to_line(costs))
