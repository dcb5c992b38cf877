"""The subcommands of `z2all bench`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from z2all_ds.base.reports import print_as_measured, print_report, to_json
from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides, refuse_without_effect
from z2all_ds.cli.verbs import Verbs

if TYPE_CHECKING:
    import torch

    from z2all_ds.base.config import RunConfig

RanksOption = Annotated[int | None, typer.Option(help="Ranks on this machine (default: one per GPU, or 1).")]
RepeatsOption = Annotated[int, typer.Option(help="Number of measurements; the median is reported.")]
RoundsOption = Annotated[int, typer.Option(help="Number of passes; medians are reported.")]

bench_app = Verbs(no_args_is_help=True, help="Measure speed and memory.")


def _run_and_device(config: str | None, overrides: list[str] | None) -> "tuple[RunConfig, torch.device]":
    """Return the run config and the device to measure on. An invalid config is reported before torch is loaded."""
    from z2all_ds.base.config import load_run_config

    run = load_run_config(config, overrides)

    from z2all_ds.bench.timing import device_here

    return run, device_here()


@bench_app.command("step")
def bench_step(
    config: ConfigOption = None,
    ranks: RanksOption = None,
    steps: Annotated[int, typer.Option(help="Steps to run; the second half is measured.")] = 20,
    floor: Annotated[bool, typer.Option("--floor", help="Also measure the floor and the distance to it.")] = False,
    peer: Annotated[bool, typer.Option("--peer", help="Also measure Hugging Face's Llama with Liger.")] = False,
    ablate: Annotated[bool, typer.Option("--ablate", help="Repeat the run without each optimization in turn.")] = False,
    rows: Annotated[str, typer.Option(help="Only these rows of --ablate, e.g. naive,use_all.")] = "",
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Measure time, tokens per second, MFU and peak memory of a training step."""
    from z2all_ds.base.errors import ConfigError

    if ablate and (floor or peer):
        raise ConfigError("--ablate", "cannot be combined with --floor or --peer", "Leave these out.")
    if rows and not ablate:
        raise ConfigError(f"--rows {rows}", "needs --ablate", "Give --ablate too.")
    from z2all_ds.bench import step as impl

    if not ablate:
        costs = impl.bench_step(config, overrides or [], ranks, steps, floor, peer)
        print_report(costs, as_json, impl.describe)
        return
    found = impl.ablate(config, overrides or [], ranks, steps, [name for name in rows.split(",") if name])
    results = print_as_measured(found, as_json, impl.HEAD, impl.to_line)
    if as_json:
        print(to_json({"rows": results}))


@bench_app.command("memory")
def bench_memory(
    context: typer.Context,
    config: ConfigOption = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks of your own run.")] = 1,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Compare peak GPU memory with `z2all plan`, for your own run or for cases that cover the planner."""
    from z2all_ds.bench import gpu_memory as impl

    if case:
        refuse_without_effect(context, ["config", "ranks", "overrides"], "--case has its own run")
    elif not (config or overrides):
        refuse_without_effect(context, ["ranks"], "it is for your own run, --config or overrides")
    cases = impl.chosen_cases(case or [], config, overrides or [], ranks)
    results = print_as_measured(impl.measure_cases(cases), as_json, impl.HEAD, impl.to_line)
    if as_json:
        print(to_json({"cases": map(impl.content_of, results)}))


@bench_app.command("checkpoint")
def bench_checkpoint(
    config: ConfigOption = None,
    ranks: RanksOption = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder on the disk to measure (default: the temporary folder).")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Saves per method; the first is not counted.")] = 4,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Measure how long saves block training and how fast they are, compared with DeepSpeed, torch and the raw disk."""
    from z2all_ds.bench import checkpoint as impl

    print_report(impl.bench_checkpoint(config, overrides or [], ranks, folder, rounds), as_json, impl.describe)


@bench_app.command("ops")
def bench_ops(
    config: ConfigOption = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Measure every backend of every op at the model's shapes: forward and backward time, and memory."""
    run, device = _run_and_device(config, overrides)
    from z2all_ds.bench import ops as impl

    print_report(impl.bench_ops(run, device, op or []), as_json, impl.describe)


@bench_app.command("floor")
def bench_floor(
    config: ConfigOption = None,
    rounds: RoundsOption = 5,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Measure only the matrix products and the attention of a training step at the model's shapes."""
    run, device = _run_and_device(config, overrides)
    from z2all_ds.bench import floor as impl

    print_report(impl.measure_floor(run, device, rounds), as_json, impl.describe)


@bench_app.command("shapes")
def bench_shapes(
    config: ConfigOption = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size (default: the config's).")] = None,
    ffn: Annotated[int | None, typer.Option(help="Desired feed-forward size (default: 8/3 of hidden).")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size (default: the config's).")] = None,
    rounds: RoundsOption = 5,
    as_json: JsonOption = False,
    overrides: Overrides = None,
) -> None:
    """Find the feed-forward and vocabulary sizes near the desired ones that are fastest on this device."""
    run, device = _run_and_device(config, overrides)
    from z2all_ds.bench import shapes as impl

    print_report(impl.measure_shapes(run, device, hidden, ffn, vocab, rounds), as_json, impl.describe)


@bench_app.command("corpus")
def bench_corpus(
    context: typer.Context,
    megabytes: Annotated[int, typer.Option(help="Megabytes of text per format.")] = 200,
    form: Annotated[list[str] | None, typer.Option(help="Only this format; may be repeated.")] = None,
    workers: Annotated[list[int] | None, typer.Option(help="Also measure with N processes; may be repeated.")] = None,
    clean: Annotated[
        list[str] | None, typer.Option(help="Cleaning step for the --workers runs; may be repeated.")
    ] = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure MB/s per core and peak memory of converting each raw format, compared with only orjson."""
    from z2all_ds.bench import corpus as impl

    if not workers:
        refuse_without_effect(context, ["clean"], "it is for runs with --workers")
    costs = impl.bench_corpus(megabytes, form or [], workers or [], clean or [], repeats)
    print_report(costs, as_json, impl.describe)


@bench_app.command("order")
def bench_order(
    corpus: Annotated[str, typer.Argument(help="Corpus, or tokens of `z2all corpus tokenize`.")],
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer folder.")],
    epochs: Annotated[list[int] | None, typer.Option(help="Measure after so many epochs; may be repeated.")] = None,
    length: Annotated[list[int] | None, typer.Option(help="Tokens per sample; may be repeated.")] = None,
    packing: Annotated[list[str] | None, typer.Option(help="cut or best_fit (default: both).")] = None,
    lanes: Annotated[int, typer.Option(help="data.num_lanes of the run.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Measure how evenly a run reads the documents of each domain."""
    from z2all_ds.bench import order as impl

    found = impl.bench_order(corpus, tokenizer, epochs or [1, 4], length or [2048], packing or [], lanes)
    print_report(found, as_json, impl.describe)


@bench_app.command("tokenizer")
def bench_tokenizer(
    inputs: Annotated[list[str] | None, typer.Argument(help="Corpus folder or files (default: built-in text).")] = None,
    sample_bytes: Annotated[int, typer.Option("--bytes", help="Bytes of text to train on.")] = 20_000_000,
    vocab_size: Annotated[int, typer.Option(help="Number of text tokens.")] = 16_000,
    weights: Annotated[str, typer.Option(help="Share of each domain, e.g. zh=0.3,en=0.4,code=0.3.")] = "",
    trainer: Annotated[list[str] | None, typer.Option(help="Only this trainer; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure encoding speed, and training time and memory against the Hugging Face trainer with its default split."""
    from z2all_ds.bench import tokenizer as impl
    from z2all_ds.tokenizer.sampling import parse_weights

    chosen = parse_weights(weights) if weights else None
    names = trainer or impl.DEFAULT_TRAINERS
    print_report(impl.bench_tokenizer(inputs or [], sample_bytes, vocab_size, chosen, names), as_json, impl.describe)


@bench_app.command("data")
def bench_data(
    context: typer.Context,
    corpus: Annotated[Path | None, typer.Option(help="Corpus folder (default: built-in text).")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder (default: 16,000 tokens, trained on the text).")
    ] = None,
    megabytes: Annotated[int, typer.Option(help="Megabytes of text to read.")] = 60,
    repeats: RepeatsOption = 3,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Do not measure other loaders.")] = False,
    peers: Annotated[Path | None, typer.Option(help="Environment of the other loaders; created if missing.")] = None,
    shards: Annotated[int, typer.Option(help="Shards of the large corpus; 0 skips it.")] = 1000,
    shard_megabytes: Annotated[int, typer.Option(help="Megabytes per shard; the shard is stored only once.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens per second per core and time to resume, compared with only the tokenizer and other loaders."""
    from z2all_ds.bench import data as impl

    if no_peers:
        refuse_without_effect(context, ["peers"], "--no-peers measures none")
    if not shards:
        refuse_without_effect(context, ["shard_megabytes"], "--shards 0 makes no large corpus")
    costs = impl.bench_data(corpus, tokenizer, megabytes, repeats, not no_peers, peers, shards, shard_megabytes)
    print_report(costs, as_json, impl.describe)


@bench_app.command("optimizers")
def bench_optimizers(
    parameters: Annotated[int | None, typer.Option(help="Number of parameters (default: by device).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure state bytes per parameter and milliseconds per step of every optimizer that runs here."""
    from z2all_ds.bench import optimizers as impl

    print_report(impl.bench_optimizers(parameters), as_json, impl.describe)


@bench_app.command("board")
def bench_board(
    records: Annotated[int, typer.Option(help="Steps of the generated run.")] = 1_000_000,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder for its files (default: the temporary folder).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how soon the board shows a long run, how long it takes to read all of it, and its peak memory."""
    from z2all_ds.bench import board as impl

    print_report(impl.bench_board(records, folder), as_json, impl.describe)
