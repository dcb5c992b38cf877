"""`z2all doctor --hostfile`: the preflight alone, for people and programs."""

import os
import tempfile
from pathlib import Path

from z2all_ds.base.console import heartbeat
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.machine import free_port
from z2all_ds.base.reports import print_report
from z2all_ds.cluster import ssh
from z2all_ds.cluster.nodes import read_nodes
from z2all_ds.cluster.preflight import report
from z2all_ds.cluster.preflight.checks import Subject, preflight


def look_at_nodes(hostfile: str, folder: Path, as_json: bool, health: bool = True, exclude_slow: bool = False) -> int:
    """The exit code: 0, or that of cluster errors where something fails."""
    nodes = read_nodes(hostfile)
    with tempfile.TemporaryDirectory() as place:
        config = ssh.write_config(nodes, Path(place) / "ssh_config")
        subject = Subject(nodes, config, os.getcwd(), str(folder.absolute()), [], free_port())
        with heartbeat(f"looking at {len(nodes)} nodes"):
            found = preflight(subject, health, exclude_slow)
    print_report(found, as_json, report.describe, report.content_of)
    return ClusterError.exit_code if found.failures else 0
