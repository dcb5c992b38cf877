"""Runs a command that would outlive its owner, as leader of a process group.

`python -m z2all_ds.cluster.launch.owned_command COMMAND ...`

DeepSpeed's runner and what it starts (pdsh, mpirun, srun) notice nothing of a launch that is killed; this does, and
asks the group to end. What runs below it, here and on other machines, has no owner to look after.
"""

import os
import signal
import subprocess
import sys
from typing import Any

from z2all_ds.base.parent_watch import OWNER_VARIABLE, follow_owner


def owned(command: list[str]) -> list[str]:
    return [sys.executable, "-m", "z2all_ds.cluster.launch.owned_command", *command]


def main(command: list[str]) -> int:
    """The command's exit code, as a shell gives it."""
    follow_owner()
    os.environ.pop(OWNER_VARIABLE, None)
    process = subprocess.Popen(command)

    def pass_on(number: int, _: Any) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
