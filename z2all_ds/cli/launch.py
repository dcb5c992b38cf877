"""The verb `z2all launch`."""

from typing import Annotated

import typer

from z2all_ds.cli.options import refuse_without_effect


def launch(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of `z2all train`, after --.")] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(
            help="DeepSpeed hostfile, or YAML with more settings (see hostfiles/; default with slurm: its nodes)."
        ),
    ] = None,
    launcher: Annotated[str, typer.Option(help="ssh, or one of DeepSpeed's: pdsh, openmpi, slurm.")] = "ssh",
    restarts: Annotated[int, typer.Option(min=0, help="Maximum number of restarts after recoverable faults.")] = 0,
    min_nodes: Annotated[int | None, typer.Option(min=1, help="Leave out failing nodes, as long as N remain.")] = None,
    preflight: Annotated[bool, typer.Option(help="Check nodes and pairs before every start.")] = True,
    health: Annotated[
        bool, typer.Option(help="Run a short torch job that finds slow nodes before the first start.")
    ] = True,
    exclude_slow: Annotated[bool, typer.Option("--exclude-slow", help="Treat slow nodes as failures.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only write and show the files and commands.")] = False,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Rendezvous port of the ranks (default: a free port).")
    ] = None,
) -> None:
    """Train on all nodes of a hostfile: z2all launch --hostfile hosts.yaml -- --config run.yaml train.steps=1000"""
    from z2all_ds.cluster.launch.multi_node import LaunchOptions
    from z2all_ds.cluster.launch.multi_node import launch as run

    if not preflight:
        refuse_without_effect(context, ["min_nodes", "exclude_slow"], "--no-preflight checks no nodes")
    if not health:
        refuse_without_effect(context, ["exclude_slow"], "--no-health finds no slow nodes")
    options = LaunchOptions(
        hostfile, launcher, restarts, min_nodes, preflight, dry_run, master_port, health, exclude_slow
    )
    run(options, arguments or [])
