"""Available memory and peak memory of this process, without loading torch."""

import resource
from contextlib import suppress
from pathlib import Path

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Return how much this process can still allocate: the minimum of machine, control groups and ulimits."""
    rooms = [_of_machine(), *_of_control_groups(), *_of_limits()]
    return max(0, min(rooms))


def peak_bytes() -> int:
    """Return the peak resident memory of this process and of the children it has waited for."""
    return max(peak_of_process(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def peak_of_process(pid: int | None = None) -> int:
    """Return the peak resident memory of a process, by default this one."""
    # getrusage may return the peak of the process that started this one.
    return _table(Path(f"/proc/{pid or 'self'}/status"))["VmHWM:"] * 1024


def _of_machine() -> int:
    return _table(Path("/proc/meminfo"))["MemAvailable:"] * 1024


def _of_limits() -> list[int]:
    """Return what is left of `ulimit -d` and `ulimit -v`."""
    status = _table(Path("/proc/self/status"))
    found = []
    for limit, counted in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            found.append(most - status[counted] * 1024)
    return found


def _of_control_groups() -> list[int]:
    """Return what is left in the control group (version 2 or 1) of this process and in each group that contains it.

    Cached file contents are freed on demand, so they count as available. In a container the path of the group may not
    be visible; then only the root is read."""
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
            # ValueError: "max", no limit. OSError: the group is not visible, or it is the root, which has no files.
            with suppress(OSError, ValueError):
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                stat = _table(folder / "memory.stat")  # in version 1, total_* includes the groups inside
                cached = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
                found.append(left + cached)
            if folder == root:
                break
    return found


def _table(path: Path) -> dict[str, int]:
    """Return name -> number for the lines of a file that have both."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
