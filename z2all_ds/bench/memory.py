"""How much memory a process has used at most."""

import resource
import sys
from pathlib import Path


def peak_memory_bytes(pid: int | None = None) -> int:
    """Of a process since it was started, by default of this one; getrusage also counts what it was forked from."""
    try:
        for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
