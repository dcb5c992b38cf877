"""A launch inside a slurm allocation: its nodes, what srun is told, and what cannot work, refused before it starts.

    SLURM_JOB_NODELIST ─▶ nodes ─▶ plan ─▶ deepspeed --launcher slurm ─▶ srun ─▶ RUN/launch/rank.py on every slot

srun numbers nodes in its own order, whatever the order of its --nodelist. Rank 0 must be on the first node, where the
master address points; so srun gets a file with one line a rank, which it follows (--distribution=arbitrary).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from z2all_ds.base.console import say
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.fault_records import KILLED, Fault, forget_fault, read_faults, write_fault
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import tasks_of_nodes
from z2all_ds.cluster.nodes import Node

TOOLS = ("srun", "sinfo", "scontrol")
"""`deepspeed` looks for sinfo; we ask scontrol."""
GPU_NAMES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
"""Of this node, inside a job; as asked for, with a type perhaps: a100:8."""
LAST_WORDS_SECONDS = 2.0
ALLOCATE = "Run it inside sbatch or salloc."
# In a file of its own: DeepSpeed's slurm runner knows scripts alone, and a script's folder comes first on sys.path.
RANK_SCRIPT = '''\
"""What srun starts for every rank; written by `z2all launch`."""

import sys

from z2all_ds.cluster.launch.slurm_rank import main

sys.exit(main())
'''


def nodes_to_use(listed: list[Node], only_shown: bool) -> list[Node]:
    """Those of a hostfile, or all of the allocation where there is none."""
    check_slots(listed)
    if listed and only_shown:  # may be done anywhere
        return listed
    require_slurm()
    allocated = allocated_names()
    check_names(listed, allocated)
    if listed:
        return listed
    slots, reason = slots_of_a_node()
    job = os.environ.get("SLURM_JOB_ID", "?")
    say(f"slurm job {job}: {len(allocated)} nodes, slots={slots} on each ({reason})")
    return [Node(name=name, slots=slots) for name in allocated]


def require_slurm() -> None:
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        rule = f"needs slurm's commands, and PATH has no {', '.join(missing)}"
        raise ClusterError("launcher slurm", rule, "Launch where slurm is installed, or use --launcher ssh.")


def allocated_names(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The nodes of the allocation that we are in."""
    written = environment.get("SLURM_JOB_NODELIST")
    if not written:
        raise ClusterError("launcher slurm", "works inside an allocation, and SLURM_JOB_NODELIST is not set", ALLOCATE)
    said = subprocess.run(["scontrol", "show", "hostnames", written], capture_output=True, text=True)
    if said.returncode or not said.stdout.split():
        reason = " ".join(said.stderr.split()) or "no word"
        raise ClusterError(f"SLURM_JOB_NODELIST={written}", f"scontrol does not read it ({reason})", ALLOCATE)
    return said.stdout.split()


def slots_of_a_node(environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Ranks to start on each node, and by what: its GPUs, else the tasks that the job asked for, else one."""
    for name in GPU_NAMES:
        count = environment.get(name, "").rpartition(":")[2]
        if count.isdigit() and int(count):
            return int(count), name
    if "SLURM_NTASKS" in environment:  # else slurm counts the CPUs here
        tasks = set(tasks_of_nodes(environment.get("SLURM_TASKS_PER_NODE", "")))
        if len(tasks) == 1:
            return tasks.pop(), "SLURM_TASKS_PER_NODE"
    return 1, "by default"


def check_slots(nodes: list[Node]) -> None:
    """DeepSpeed would refuse it with a traceback."""
    if len({node.slots for node in nodes}) > 1:
        slots = ", ".join(f"{node.name} {node.slots}" for node in nodes)
        rule = "must be the same on all nodes, as DeepSpeed has one number for srun"
        raise ClusterError(f"slots ({slots})", rule, "Make them equal, or use --launcher ssh.")


def check_names(nodes: list[Node], allocated: list[str]) -> None:
    """srun would say that a node configuration is not available."""
    foreign = [node.name for node in nodes if node.name not in allocated]
    if foreign:
        rule = f"is not in the allocation, which has {', '.join(allocated)}"
        raise ClusterError(f"node {foreign[0]}", rule, "Use the names that slurm uses, or leave --hostfile out.")


def tasks_text(nodes: list[Node]) -> str:
    """The node of every rank."""
    return "".join(f"{node.name}\n" * node.slots for node in nodes)


def srun_options(tasks: Path) -> str:
    """Beside the number of ranks, which DeepSpeed gives it. `tasks`: an absolute path, which is how srun knows that it
    is a file."""
    options = [
        *(f"--nodelist={tasks}", "--distribution=arbitrary"),
        "--overlap",  # with the step of an interactive shell, which holds everything
        "--kill-on-bad-exit=1",  # when one is gone, all are
    ]
    return shlex.join(options)


class SrunWords:
    """What srun and the ranks say on stderr, passed on as it comes; and of which rank srun says first that it died."""

    def __init__(self, stream: IO[str]) -> None:
        self.first_killed: Fault | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        for line in self._stream:
            self.first_killed = self.first_killed or killed_rank(line)
            with suppress(OSError):
                sys.stderr.write(line)
                sys.stderr.flush()

    def wait(self) -> None:
        self._thread.join(LAST_WORDS_SECONDS)


def killed_rank(line: str) -> Fault | None:
    """Of a rank that somebody else has ended; not of those that srun ends itself because of it, nor those that fail."""
    match = re.fullmatch(r"srun: error: (\S+): tasks? ([0-9]+)[0-9,-]*: (.+?)(?: \(core dumped\))?", line.strip())
    if not match or match[3].startswith(("Exited", "Terminated")):
        return None
    said = f"ClusterError: rank {match[2]}: its process was killed from outside (srun: {match[3]})"
    fault_line = f"{said}. Look for who did it."
    return Fault(KILLED, int(match[2]), match[1], fault_line, ClusterError.exit_code, weight=1)


def note_killed(folder: RunFolder, killed: Fault | None) -> None:
    """srun hears of all ranks by one clock, and a node's watchdog may have been ended with the last rank there.

    A rank's own error stays; what its watchdog has said of it stays too, with srun's weight.
    """
    if killed is None:
        return
    known = [fault for fault in read_faults(folder) if fault.rank == killed.rank]
    if all(fault.kind == KILLED for fault in known):
        forget_fault(folder, killed.rank)
        write_fault(folder, replace(known[0], weight=killed.weight) if known else killed)
