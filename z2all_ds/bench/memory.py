"""How much memory a process has used at most."""

import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Of this process since it was started; getrusage also counts the process it was forked from."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
