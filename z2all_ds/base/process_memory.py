"""How much memory this process may still take, and how much it has taken at most. Loads no torch."""

import resource
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes() -> int:
    """The least that the machine, the control groups around this process and its own limits have left."""
    rooms = [_of_machine(), *_of_control_groups(), *_of_limits()]
    return max(0, min(rooms))


def peak_bytes() -> int:
    """The most that this process or one that it has waited for has had resident at any time."""
    return max(peak_of_process(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def peak_of_process(pid: int | None = None) -> int:
    """The most bytes that one process, by default this one, has had resident since it started."""
    # Of this process getrusage may tell the peak of the one that has started it.
    return _table(Path(f"/proc/{pid or 'self'}/status"))["VmHWM:"] * 1024


def _of_machine() -> int:
    return _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024


def _of_limits() -> list[int]:
    """`ulimit -d` and `ulimit -v`, less what they have been counting so far."""
    status = _table(Path("/proc/self/status"))
    found = []
    for limit, counted in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(most - status[counted] * 1024)
    return found


def _of_control_groups() -> list[int]:
    """Of version 2 or 1, this process's group and those around it. What they have read from files is given up on
    demand and does not count. In a container the group's own path may lie outside: then the root is all there is."""
    found = []
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = CGROUPS, "memory.max", "memory.current"
        elif controllers == "memory":
            root, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            # ValueError: "max", no limit. OSError: no such group here, or the root, which has no files.
            with suppress(OSError, ValueError):
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = _table(folder / "memory.stat")  # version 1 has sums over the groups inside under total_
                cached = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
                found.append(left + cached)
            if folder == root:
                break
    return found


def _table(path: Path) -> dict[str, int]:
    """Name -> the number beside it, of lines that have one."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
