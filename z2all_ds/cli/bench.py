"""The verbs of `z2all bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from z2all_ds.base.reports import print_as_measured, print_report, to_json
from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides

if TYPE_CHECKING:
    import torch

    from z2all_ds.base.config import RunConfig

RanksOption = Annotated[int | None, typer.Option(help="Processes on this machine (default: its GPUs, or 1).")]
RepeatsOption = Annotated[int, typer.Option(help="Times to measure each; the middle one counts.")]
RoundsOption = Annotated[int, typer.Option(help="Passes over everything; medians count.")]

bench_app = typer.Typer(no_args_is_help=True, help="Measure speed and memory.")


def _run_and_device(config: str | None, overrides: list[str] | None) -> "tuple[RunConfig, torch.device]":
    """Returns the run config and the device to measure on. A mistake in the config shows before torch is loaded."""
    from z2all_ds.base.config import load_run_config

    run = load_run_config(config, overrides)

    from z2all_ds.bench.timing import device_here

    return run, device_here()


@bench_app.command("step")
def bench_step(
    config: ConfigOption = None,
    ranks: RanksOption = None,
    steps: Annotated[int, typer.Option(help="Steps to take; the second half is measured.")] = 20,
    floor: Annotated[bool, typer.Option("--floor", help="Measure the floor too, and the distance to it.")] = False,
    peer: Annotated[bool, typer.Option("--peer", help="Measure Hugging Face's Llama with Liger too.")] = False,
    ablate: Annotated[bool, typer.Option("--ablate", help="A run without each part of the speed in turn.")] = False,
    rows: Annotated[str, typer.Option(help="Only these rows of --ablate, e.g. naive,use_all.")] = "",
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Time, tokens per second, MFU and peak memory of a training step."""
    from z2all_ds.base.errors import ConfigError

    if ablate and (floor or peer):
        raise ConfigError("--ablate", "is a table by itself", "Leave out --floor and --peer.")
    if rows and not ablate:
        raise ConfigError(f"--rows {rows}", "names rows of --ablate", "Give --ablate too.")
    if ablate:
        from z2all_ds.bench import ablation as room

        names = [name for name in rows.split(",") if name]
        found = room.ablate(config, overrides or [], ranks, steps, names)
        results = print_as_measured(found, as_json, room.HEAD, room.to_line)
        if as_json:
            print(to_json({"rows": results}))
        return
    from z2all_ds.bench.step import bench_step as measure
    from z2all_ds.bench.step import describe

    print_report(measure(config, overrides or [], ranks, steps, floor, peer), as_json, describe)


@bench_app.command("memory")
def bench_memory(
    config: ConfigOption = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be given several times.")] = None,
    ranks: Annotated[int, typer.Option(help="Of a run of your own.")] = 1,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Peak memory on the GPU, and what `z2all plan` says: of your own run, or of cases that cover the planner."""
    from z2all_ds.bench import gpu_memory as room

    cases = room.chosen_cases(case or [], config, overrides or [], ranks)
    results = print_as_measured(room.measure_cases(cases), as_json, room.HEAD, room.to_line)
    if as_json:
        print(to_json({"cases": map(room.content_of, results)}))


@bench_app.command("checkpoint")
def bench_checkpoint(
    config: ConfigOption = None,
    ranks: RanksOption = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="On the disk to be measured (default: the temporary folder).")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Saves by each way; all but the first count.")] = 4,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """How long saves keep training waiting and how fast they are, by our, DeepSpeed's and torch's ways."""
    from z2all_ds.bench import checkpoint as room

    print_report(room.bench_checkpoint(config, overrides or [], ranks, folder, rounds), as_json, room.describe)


@bench_app.command("ops")
def bench_ops(
    config: ConfigOption = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be given several times.")] = None,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Every implementation of every op at the model's shapes: time forward and backward, memory, rate."""
    run, device = _run_and_device(config, overrides)
    from z2all_ds.bench import ops as room

    print_report(room.bench_ops(run, device, op or []), as_json, room.describe)


@bench_app.command("floor")
def bench_floor(
    config: ConfigOption = None,
    rounds: RoundsOption = 5,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """What the matrix products and the attention of a training step cost here at the model's shapes, nothing else."""
    run, device = _run_and_device(config, overrides)
    from z2all_ds.bench import floor as room

    print_report(room.measure_floor(run, device, rounds), as_json, room.describe)


@bench_app.command("shapes")
def bench_shapes(
    config: ConfigOption = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size (default: the config's).")] = None,
    ffn: Annotated[int | None, typer.Option(help="Feed-forward size you wish (default: 8/3 of hidden).")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens of the vocabulary (default: the config's).")] = None,
    rounds: RoundsOption = 5,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Feed-forward and vocabulary sizes near those you wish: which of them this device computes fastest."""
    run, device = _run_and_device(config, overrides)
    from z2all_ds.bench import shapes as room

    print_report(room.measure_shapes(run, device, hidden, ffn, vocab, rounds), as_json, room.describe)


@bench_app.command("corpus")
def bench_corpus(
    megabytes: Annotated[int, typer.Option(help="Of text in each form.")] = 200,
    form: Annotated[list[str] | None, typer.Option(help="Only this form; may be given several times.")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Also with so many processes; may be repeated.")] = None,
    clean: Annotated[list[str] | None, typer.Option(help="Cleaning steps for --workers.")] = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """MB/s per core and peak memory of converting raw data, for each form, compared with orjson alone."""
    from z2all_ds.bench import corpus as room

    costs = room.bench_corpus(megabytes, form or [], workers or [], clean or [], repeats)
    print_report(costs, as_json, room.describe)


@bench_app.command("tokenizer")
def bench_tokenizer(
    inputs: Annotated[list[str] | None, typer.Argument(help="Corpus folder or files (default: built-in text).")] = None,
    sample_bytes: Annotated[int, typer.Option("--bytes", help="Text to train on.")] = 20_000_000,
    vocab_size: Annotated[int, typer.Option(help="Text tokens.")] = 16_000,
    weights: Annotated[str, typer.Option(help="Part of each domain, e.g. zh=0.3,en=0.4,code=0.3.")] = "",
    trainer: Annotated[list[str] | None, typer.Option(help="Only this trainer; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time, peak memory and encoding speed of our trainers and of the Hugging Face trainer with its default split."""
    from z2all_ds.bench import tokenizer as room
    from z2all_ds.tokenizer.sampling import parse_weights

    chosen = {"names": trainer} if trainer else {}
    costs = room.bench_tokenizer(
        inputs or [], sample_bytes, vocab_size, parse_weights(weights) if weights else None, **chosen
    )
    print_report(costs, as_json, room.describe)


@bench_app.command("data")
def bench_data(
    corpus: Annotated[Path | None, typer.Option(help="Corpus folder (default: built-in text).")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder (default: 16,000 tokens, trained on the text).")
    ] = None,
    megabytes: Annotated[int, typer.Option(help="Of text to read.")] = 60,
    repeats: RepeatsOption = 3,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Leave other loaders out.")] = False,
    peers: Annotated[Path | None, typer.Option(help="Environment of the other loaders; made if missing.")] = None,
    shards: Annotated[int, typer.Option(help="Of the large corpus; 0 leaves it out.")] = 1000,
    shard_megabytes: Annotated[int, typer.Option(help="Of each of its shards; it is on disk once.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of one core and time to resume, compared with the tokenizer alone and other loaders."""
    from z2all_ds.bench import data as room

    costs = room.bench_data(corpus, tokenizer, megabytes, repeats, not no_peers, peers, shards, shard_megabytes)
    print_report(costs, as_json, room.describe)


@bench_app.command("optimizers")
def bench_optimizers(
    parameters: Annotated[int | None, typer.Option(help="Weights to step (default: by device).")] = None,
    as_json: JsonOption = False,
) -> None:
    """State bytes per parameter and milliseconds per step of every optimizer that runs here."""
    from z2all_ds.bench import optimizers as room

    print_report(room.bench_optimizers(parameters), as_json, room.describe)


@bench_app.command("board")
def bench_board(
    records: Annotated[int, typer.Option(help="Steps of the run that is made.")] = 1_000_000,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where its files are made (default: the temporary folder).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """How soon the board shows a long run, how long it reads all of it, and its peak memory."""
    from z2all_ds.bench import board as room

    print_report(room.bench_board(records, folder), as_json, room.describe)
