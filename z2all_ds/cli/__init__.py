"""The `z2all` command: verbs and their options. Each verb imports what it needs when it runs, so that help is instant.

The groups of verbs (`train`, `corpus`, `tokenizer`, `checkpoint`, `evaluate`, `cluster`, `track`, `bench`) and verbs
with many options have their own files. No other package imports this one. A user error prints one line and exits with
the code of its class; `--debug` (or Z2ALL_DEBUG=1) shows the traceback.
"""

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from z2all_ds import __version__
from z2all_ds.base.console import say
from z2all_ds.base.errors import MachineError, Z2allError
from z2all_ds.base.reports import print_lines, print_report
from z2all_ds.cli.bench import bench_app
from z2all_ds.cli.board import board
from z2all_ds.cli.checkpoint import checkpoint_app
from z2all_ds.cli.cluster import cluster_app
from z2all_ds.cli.corpus import corpus_app
from z2all_ds.cli.evaluate import evaluate_app
from z2all_ds.cli.generate import generate
from z2all_ds.cli.launch import launch
from z2all_ds.cli.options import ConfigOption, JsonOption, Overrides, refuse_without_effect
from z2all_ds.cli.plan import plan
from z2all_ds.cli.plot import plot
from z2all_ds.cli.tokenizer import tokenizer_app
from z2all_ds.cli.track import track_app
from z2all_ds.cli.train import train_app
from z2all_ds.cli.verbs import Verbs, VerbsByTask

app = Verbs(
    cls=VerbsByTask,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train a Llama-2-structure model with DeepSpeed, from raw text to a Hugging Face checkpoint.",
)
app.add_typer(train_app, name="train")
app.add_typer(corpus_app, name="corpus")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(evaluate_app, name="evaluate")
app.add_typer(cluster_app, name="cluster")
app.add_typer(track_app, name="track")
app.add_typer(bench_app, name="bench")
app.command("plan")(plan)
app.command("board")(board)
app.command("plot")(plot)
app.command("generate")(generate)
app.command("launch", context_settings={"ignore_unknown_options": True})(launch)


def main() -> NoReturn:
    """Run the console script."""
    try:
        from z2all_ds.base.child_process import SAFE_PATH
        from z2all_ds.base.paths import explain_system_errors

        # For the workers of multiprocessing, too, which `child_process.start` does not start.
        os.environ.setdefault(SAFE_PATH, "1")
        # Handle SIGTERM like Ctrl-C: `finally` blocks run, so no child process is left behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with explain_system_errors():
            app()
    except Z2allError as error:
        if os.environ.get("Z2ALL_DEBUG"):
            traceback.print_exc()
        say(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Also show the traceback of user errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if debug:
        os.environ["Z2ALL_DEBUG"] = "1"


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for all output.")] = Path("quickstart_out"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of continuing.")] = False,
    overrides: Overrides = None,
) -> None:
    """Run everything once: corpus, tokenizer, training with a stop and a resume, verified export, generation."""
    from z2all_ds.quickstart.walk import run_quickstart

    run_quickstart(out, fresh, overrides or [])


@app.command()
def config(
    context: typer.Context,
    config: ConfigOption = None,
    from_hf: Annotated[
        Path | None, typer.Option(help="Print only the model section, taken from this Llama folder.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add help, choices and default of every setting as comments.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Print the resolved run config: every setting with its value."""
    from z2all_ds.base.config import dump_model_yaml, dump_yaml, load_run_config
    from z2all_ds.base.config.explain import explained_yaml

    if from_hf is not None:
        from z2all_ds.base.llama_folder import LlamaFolder

        refuse_without_effect(context, ["config", "explain", "overrides"], "--from-hf prints what that folder has")
        print(dump_model_yaml(LlamaFolder(from_hf, "--from-hf").model_fields), end="")
        return
    print((explained_yaml if explain else dump_yaml)(load_run_config(config, overrides)), end="")


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="Run folder (exports its newest checkpoint) or checkpoint folder.")
    ],
    out: Annotated[Path | None, typer.Option(help="Output folder (default: exports/step_N in the run folder).")] = None,
    model_format: Annotated[
        str, typer.Option("--format", help="llama: loads without this package. z2all: this package's model class.")
    ] = "llama",
    dtype: Annotated[str, typer.Option(help="Weight dtype: fp32, bf16 or fp16.")] = "bf16",
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a safetensors file, e.g. 4GB or 500MB.")] = "4GB",
) -> None:
    """Write a Hugging Face folder and verify that its logits match those of the training weights."""
    from z2all_ds.base.parent_watch import follow_owner

    follow_owner()  # an export that a run starts in the background ends with the run
    from z2all_ds.base.console import human_bytes
    from z2all_ds.export.to_hf import export_checkpoint

    report = export_checkpoint(checkpoint, out, dtype, max_shard_size, model_format)
    loss = report.verdict.loss_difference
    print_lines(
        [
            f"{report.folder}: step {report.step}, {report.parameters:,} parameters, logits within "
            f"{report.verdict.max_relative_difference:.1e} on {report.verdict.tokens_compared} tokens"
            f"{'' if loss is None else f', loss within {loss:.1e} of that in training'} "
            f"({report.verdict.how}); peak memory {human_bytes(report.peak_memory_bytes)}"
        ]
    )


@app.command()
def doctor(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder for runs (default: run_dir of --config, else the current folder).")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Run YAML: also check its data, tokenizer and DeepSpeed JSON.")
    ] = None,
    hostfile: Annotated[str | None, typer.Option(help="Check these nodes and every pair of them instead.")] = None,
    health: Annotated[bool, typer.Option(help="With --hostfile: run a short torch job that finds slow nodes.")] = True,
    exclude_slow: Annotated[
        bool, typer.Option("--exclude-slow", help="With --hostfile: treat slow nodes as failures.")
    ] = False,
    prebuild: Annotated[bool, typer.Option("--prebuild", help="Build DeepSpeed's ops now.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Remove locks of killed builds.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or all nodes of a hostfile, for everything that has stopped a run before."""
    from z2all_ds.base.config import load_run_config
    from z2all_ds.base.errors import ConfigError
    from z2all_ds.cluster import doctor as impl

    of_one = {"--config": config, "--prebuild": prebuild, "--fix": fix}
    of_many = {"--no-health": not health, "--exclude-slow": exclude_slow}
    for option, given in (of_many if hostfile is None else of_one).items():
        if given:
            rule = "needs --hostfile" if hostfile is None else "works on one machine, not with --hostfile"
            advice = "Give --hostfile H" if hostfile is None else "Run it on a node, without --hostfile"
            raise ConfigError(option, rule, f"{advice}, or leave out {option}.")
    if not health:
        refuse_without_effect(context, ["exclude_slow"], "--no-health finds no slow nodes")
    # First, so that an error in it is reported before a build.
    run = None if config is None else load_run_config(config)
    folder = folder or Path(run.run_dir if run else ".")
    impl.require_folder(folder)
    if hostfile is not None:
        from z2all_ds.cluster.preflight.command import check_nodes

        raise typer.Exit(check_nodes(hostfile, folder, as_json, health, exclude_slow))
    from z2all_ds.base.console import say
    from z2all_ds.base.machine import extensions_dir
    from z2all_ds.zero.build_locks import remove_stale_locks

    if fix:
        for lock in remove_stale_locks(extensions_dir()):
            say(f"removed {lock}")
    if prebuild:
        from z2all_ds.zero.op_builds import buildable_ops
        from z2all_ds.zero.op_builds import prebuild as build

        build(buildable_ops())
    findings = [*impl.examine(folder), *impl.examine_further(folder, run)]
    print_report(findings, as_json, impl.describe)
    raise typer.Exit(MachineError.exit_code if impl.has_failures(findings) else 0)


if __name__ == "__main__":
    main()
