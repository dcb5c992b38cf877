"""The verb `z2all launch`."""

from typing import Annotated

import typer


def launch(
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: as for `z2all train`.")] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(help="DeepSpeed's hostfile, or a YAML that says more (hostfiles/). For slurm: default its nodes."),
    ] = None,
    launcher: Annotated[str, typer.Option(help="ssh, or one of DeepSpeed's own: pdsh, openmpi, slurm.")] = "ssh",
    restarts: Annotated[int, typer.Option(help="How often to start again after a fault that may be cured.")] = 0,
    min_nodes: Annotated[int | None, typer.Option(help="Go on without unfit nodes, with so many at least.")] = None,
    preflight: Annotated[bool, typer.Option(help="Look at nodes and pairs before every start.")] = True,
    health: Annotated[bool, typer.Option(help="A short torch job before the first start finds slow nodes.")] = True,
    exclude_slow: Annotated[bool, typer.Option("--exclude-slow", help="Slow nodes are not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the files and commands.")] = False,
    master_port: Annotated[int | None, typer.Option(help="Where ranks meet (default: a free port).")] = None,
) -> None:
    """Train on all nodes of a hostfile: z2all launch --hostfile hosts.yaml -- --config run.yaml train.steps=1000"""
    from z2all_ds.cluster.launch.multi_node import LaunchOptions
    from z2all_ds.cluster.launch.multi_node import launch as run

    options = LaunchOptions(
        hostfile, launcher, restarts, min_nodes, preflight, dry_run, master_port, health, exclude_slow
    )
    run(options, arguments or [])
