"""`z2all cluster ...`"""

from pathlib import Path
from typing import Annotated

import typer

from z2all_ds.cli.options import JsonOption

cluster_app = typer.Typer(no_args_is_help=True, help="What nodes need beside a launch.")
overlay_app = typer.Typer(no_args_is_help=True, help="A network between containers that cannot reach each other.")
cluster_app.add_typer(overlay_app, name="overlay")
HostfileOption = Annotated[str, typer.Option(help="The nodes; the first one is the hub.")]


@overlay_app.command()
def up(
    hostfile: HostfileOption,
    out: Annotated[Path | None, typer.Option(help="YAML to write for launches in it (default: printed).")] = None,
    kind: Annotated[
        str, typer.Option(help="ssh: tunnels to the first node's ssh port. vxlan: UDP between all pairs.")
    ] = "ssh",
    network: Annotated[str, typer.Option(help="Addresses to give out, one a node.")] = "10.213.0.0/24",
) -> None:
    """Give every node an address that all others reach, or restore what is broken of that."""
    from z2all_ds.cluster.overlay import command as overlay

    overlay.up(hostfile, kind, network, out)


@overlay_app.command()
def down(hostfile: HostfileOption) -> None:
    """End its tunnels and remove its devices and keys from every node."""
    from z2all_ds.cluster.overlay import command as overlay

    overlay.down(hostfile)


@overlay_app.command()
def status(hostfile: HostfileOption, as_json: JsonOption = False) -> None:
    """What there is of it on every node; ends with code 5 where one is not up."""
    from z2all_ds.cluster.overlay import command as overlay

    raise typer.Exit(overlay.status(hostfile, as_json))
