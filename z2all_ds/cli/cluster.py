"""The verbs of `z2all cluster`."""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.cli.options import JsonOption
from z2all_ds.cli.verbs import Verbs

cluster_app = Verbs(no_args_is_help=True, help="Set up the network between nodes.")
overlay_app = Verbs(no_args_is_help=True, help="An overlay network between containers that cannot reach each other.")
cluster_app.add_typer(overlay_app, name="overlay")
HostfileOption = Annotated[str, typer.Option(help="Hostfile; its first node is the hub.")]


@overlay_app.command()
def up(
    hostfile: HostfileOption,
    out: Annotated[
        Path | None, typer.Option(help="Hostfile to write for launches over it (default: print it).")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="ssh: tunnels to the first node's ssh port. vxlan: UDP between all pairs.")
    ] = "ssh",
    network: Annotated[str, typer.Option(help="Address range, one address per node.")] = "10.213.0.0/24",
) -> None:
    """Give every node an address that all others can reach, or restore broken links."""
    from z2all_ds.cluster.overlay import command as overlay

    overlay.up(hostfile, kind, network, out)


@overlay_app.command()
def down(hostfile: HostfileOption) -> None:
    """Close the tunnels and remove the devices and keys from every node."""
    from z2all_ds.cluster.overlay import command as overlay

    overlay.down(hostfile)


@overlay_app.command()
def status(hostfile: HostfileOption, as_json: JsonOption = False) -> None:
    """Show the state of the overlay on every node; exit code 5 if a node is not up."""
    from z2all_ds.cluster.overlay import command as overlay

    raise typer.Exit(overlay.status(hostfile, as_json))
