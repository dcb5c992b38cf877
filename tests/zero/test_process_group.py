"""Tests of the process group: the store of rank 0 listens only on the given address, and ranks find each other."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import ROOT
from z2all_ds.base.machine import free_port
from z2all_ds.zero.process_group import listen

RANKS = """
import os, sys, torch
from datetime import timedelta
import torch.distributed as dist
from z2all_ds.zero.process_group import join
from z2all_ds.base.world import World
join(World.from_environment(), torch.device("cpu"), timedelta(seconds=30))
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
# one write: `print` makes several where PYTHONUNBUFFERED is set, and two ranks share a pipe under torchrun
sys.stdout.write(f"{dist.get_world_size()} {total.item()}\\n")
dist.destroy_process_group()  # a gloo group that is left to the interpreter's end aborts it now and then
"""


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_the_store_listens_only_on_the_given_numeric_address(address: str, family: int) -> None:
    if family == socket.AF_INET6 and not _has_ipv6():
        pytest.skip("this machine has no ::1")
    listening = listen(address, 0)
    assert listening is not None
    with listening:
        assert listening.getsockname()[0] == address


@pytest.mark.parametrize("address", ["localhost", socket.gethostname(), "192.0.2.7"])
def test_host_names_and_addresses_of_other_machines_are_left_to_torch(address: str) -> None:
    """A machine often resolves its own name to 127.0.1.1, and in a cloud no interface has its external address."""
    assert listen(address, 0) is None


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def ranks(address: str, command: list[str], port: int) -> list[str]:
    started = []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in variables.items()}}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return said


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_two_ranks_form_a_process_group(address: str) -> None:
    assert ranks(address, [sys.executable, "-c", RANKS], free_port()) == ["2 3.0\n", "2 3.0\n"]


def test_two_ranks_under_torchrun_use_its_store(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 3.0\n2 3.0\n"
