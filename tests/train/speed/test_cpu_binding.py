"""Binding of ranks to the CPUs next to their GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.comparing import on_gpu
from z2all_ds.train.speed import cpu_binding
from z2all_ds.train.speed.cpu_binding import bind_to_gpu, bits_set, numa_nodes, processors_near


def test_bits_of_a_mask_are_cpu_numbers() -> None:
    assert bits_set([0b1011, 0, 1 << 63]) == {0, 1, 3, 191}
    assert bits_set([]) == set()


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    for name in ("node0", "node1", "node10", "online", "nodes"):
        (tmp_path / name).mkdir()
    assert numa_nodes(tmp_path) == 3
    assert numa_nodes(tmp_path / "none") == 0


def test_every_thread_is_bound() -> None:
    """In a separate process, both an existing thread and a thread started later are bound."""
    code = """
import os, threading
from z2all_ds.train.speed.cpu_binding import bind_all_threads
ready, go, seen = threading.Event(), threading.Event(), []
def before():
    ready.set(); go.wait(); seen.append(os.sched_getaffinity(0))
first = threading.Thread(target=before); first.start(); ready.wait()
one = {min(os.sched_getaffinity(0))}
bind_all_threads(one); go.set(); first.join()
second = threading.Thread(target=before); second.start(); second.join()
assert seen == [one, one], seen
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_bound_for_a_cpu_device() -> None:
    said: list[str] = []
    before = os.sched_getaffinity(0)
    bind_to_gpu(torch.device("cpu"), said.append)
    assert said == [] and os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("hinders", "line"),
    [
        (ImportError("no pynvml"), "no NUMA binding: nvidia-ml-py is not installed (pip install 'z2all_ds[gpu]')"),
        (RuntimeError("NVML reports Not Supported"), "no NUMA binding: NVML reports Not Supported"),
    ],
)
def test_a_failed_binding_logs_one_line(monkeypatch: pytest.MonkeyPatch, hinders: Exception, line: str) -> None:
    def fails(_: torch.device) -> set[int]:
        raise hinders

    monkeypatch.setattr(cpu_binding, "numa_nodes", lambda: 2)
    monkeypatch.setattr(cpu_binding, "processors_near", fails)
    said: list[str] = []
    bind_to_gpu(torch.device("cuda", 0), said.append)
    assert said == [line]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_nvml_reports_cpus_of_this_machine(device: str) -> None:
    pytest.importorskip("pynvml")
    near = processors_near(torch.device(device, 0))
    assert near and max(near) < (os.cpu_count() or 1)
