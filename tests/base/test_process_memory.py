"""Available memory within the limits of machine, control groups and ulimits, and peak memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import environment
from z2all_ds.base import process_memory

LIMITED = """
import resource
from z2all_ds.base.process_memory import available_bytes

before = available_bytes()
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("{counted}")) * 1024
resource.setrlimit(resource.{limit}, (used + 50_000_000, used + 50_000_000))
print(before, available_bytes())
"""


@pytest.mark.parametrize(("limit", "counted"), [("RLIMIT_DATA", "VmData:"), ("RLIMIT_AS", "VmSize:")])
def test_ulimits_reduce_the_available_memory(limit: str, counted: str) -> None:
    code = LIMITED.format(limit=limit, counted=counted)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    before, after = map(int, result.stdout.split())
    assert before > 100_000_000
    assert 40_000_000 < after <= 50_000_000


def test_the_peak_grows_with_the_allocated_memory() -> None:
    """Measured in a child process, since the peak of this process may already be higher."""
    code = (
        "from z2all_ds.base.process_memory import peak_bytes; before = peak_bytes();"
        "block = b'x' * 200_000_000; print(peak_bytes() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 190_000_000 < grown < 300_000_000


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/job/a", {"job/memory.max": "1000", "job/memory.current": "700", "job/memory.stat": "inactive_file 50"}),
        ("0::/elsewhere", {"memory.max": "1000", "memory.current": "650", "job/a/memory.max": "10"}),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": "1000",
                "memory/job/memory.usage_in_bytes": "800",
                "memory/job/memory.stat": "active_file 1\ntotal_active_file 100\ntotal_inactive_file 50",
            },
        ),
    ],
)
def test_control_groups_reduce_the_available_memory(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases: version 2 with a limit on the enclosing group, version 2 inside a container, and version 1."""
    for name, content in {"memory.stat": "", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path / "cgroup").write_text(f"3:cpuset:/\n{line}\n")
    monkeypatch.setattr(process_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(process_memory, "OWN_CGROUPS", tmp_path / "cgroup")
    assert process_memory.available_bytes() == 350


def test_without_limits_the_memory_of_the_machine_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(process_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(process_memory, "OWN_CGROUPS", tmp_path / "cgroup")
    assert process_memory.available_bytes() > 100_000_000
