"""Where ranks are reached: the data address of each node, and the point on the master where all of them meet."""

from dataclasses import dataclass

from z2all_ds.cluster.nodes import Node


@dataclass(frozen=True)
class DataAddress:
    """Where a node's ranks are reached by those of the others."""

    address: str
    interface: str


def meeting_point(master: Node, place: DataAddress, port: int) -> tuple[str, int]:
    """Where ranks of the other nodes find the master."""
    if master.outside:
        return master.outside.address, master.outside.port or port
    return place.address, inside_port(master, port)


def inside_port(master: Node, port: int) -> int:
    """Where the master itself listens; a mapped port may be another one outside."""
    return (master.inside.port if master.inside else None) or port
