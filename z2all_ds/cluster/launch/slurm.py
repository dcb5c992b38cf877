"""A launch inside a slurm allocation: its nodes, the options of srun, and its ranks.

    SLURM_JOB_NODELIST ─▶ nodes ─▶ plan ─▶ deepspeed --launcher slurm ─▶ srun ─▶ RUN/launch/rank.py on every slot

srun numbers nodes in its own order, whatever the order of --nodelist. Rank 0 must be on the first node, which is the
master; so srun gets a file with one line per rank, which it follows (--distribution=arbitrary).
"""

import logging
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

from z2all_ds.base.child_process import checkout_folder
from z2all_ds.base.console import printable, say
from z2all_ds.base.errors import ClusterError
from z2all_ds.base.fault_records import KILLED, Fault, forget_fault, read_faults, write_fault
from z2all_ds.base.machine import default_environment
from z2all_ds.base.run_folder import RunFolder
from z2all_ds.base.world import slurm_numbers, tasks_of_nodes
from z2all_ds.cluster.nodes import Node

TOOLS = ("srun", "sinfo", "scontrol")
"""`deepspeed` needs sinfo; we need scontrol."""
GPU_NAMES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
"""GPUs of this node; GPUs as requested, perhaps with a type: a100:8."""
LAST_LINES_SECONDS = 2.0
ALLOCATE = "Run it inside sbatch or salloc."
# DeepSpeed's slurm runner starts scripts only. Written to a folder of its own, since that comes first on sys.path.
RANK_SCRIPT = f'''\
"""The script that srun starts for every rank; written by `z2all launch`."""

import os
import sys

# DeepSpeed puts the current folder on PYTHONPATH, and others may be able to write to it.
sys.path[:] = [path for path in sys.path if path != os.getcwd() or path == {checkout_folder()!r}]

from z2all_ds.cluster.launch.slurm import run_rank

sys.exit(run_rank())
'''


def nodes_to_use(listed: list[Node], is_dry_run: bool) -> list[Node]:
    """Return the nodes of the hostfile, or all of the allocation if there is none; refuse what srun cannot do."""
    if len({node.slots for node in listed}) > 1:
        slots = ", ".join(f"{node.name} {node.slots}" for node in listed)
        rule = "must be the same on all nodes, as DeepSpeed passes one number to srun"
        raise ClusterError(f"slots ({slots})", rule, "Make them equal, or use --launcher ssh.")
    if listed and is_dry_run:  # works outside an allocation, too
        return listed
    require_slurm()
    allocated = allocated_names()
    foreign = [node.name for node in listed if node.name not in allocated]
    if foreign:
        rule = f"is not in the allocation, which has {', '.join(allocated)}"
        raise ClusterError(f"node {foreign[0]}", rule, "Use slurm's names of the nodes, or leave out --hostfile.")
    if listed:
        return listed
    count, reason = slots_per_node()
    job = os.environ.get("SLURM_JOB_ID", "?")
    say(f"slurm job {job}: {len(allocated)} nodes, slots={count} on each ({reason})")
    return [Node(name=name, slots=count) for name in allocated]


def require_slurm() -> None:
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        rule = f"needs slurm's commands, but PATH has no {', '.join(missing)}"
        raise ClusterError("launcher slurm", rule, "Launch where slurm is installed, or use --launcher ssh.")


def allocated_names(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the nodes of the current allocation."""
    written = environment.get("SLURM_JOB_NODELIST")
    if not written:
        raise ClusterError("launcher slurm", "works inside an allocation, but SLURM_JOB_NODELIST is not set", ALLOCATE)
    answer = subprocess.run(["scontrol", "show", "hostnames", written], capture_output=True, text=True)
    if answer.returncode or not answer.stdout.split():
        reason = " ".join(answer.stderr.split()) or "no message"
        raise ClusterError(f"SLURM_JOB_NODELIST={written}", f"scontrol cannot read it ({reason})", ALLOCATE)
    return answer.stdout.split()


def slots_per_node(environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the ranks per node and their source: its GPUs, else the tasks that the job requested, else one."""
    for name in GPU_NAMES:
        count = environment.get(name, "").rpartition(":")[2]
        if count.isdigit() and int(count):
            return int(count), name
    if "SLURM_NTASKS" in environment:  # otherwise slurm counts CPUs here
        tasks = set(tasks_of_nodes(environment.get("SLURM_TASKS_PER_NODE", "")))
        if len(tasks) == 1:
            return tasks.pop(), "SLURM_TASKS_PER_NODE"
    return 1, "default"


def tasks_text(nodes: list[Node]) -> str:
    """Return the node of every rank, one per line."""
    return "".join(f"{node.name}\n" * node.slots for node in nodes)


def srun_options(tasks: Path) -> str:
    """Return the options of srun; DeepSpeed adds the number of ranks. `tasks` must be absolute: otherwise srun takes
    it for a node name."""
    options = [
        *(f"--nodelist={tasks}", "--distribution=arbitrary"),
        "--overlap",  # with the step of an interactive shell, which uses all resources
        "--kill-on-bad-exit=1",  # one rank that ends badly ends all
    ]
    return shlex.join(options)


class SrunOutput:
    """Passes on the stderr of srun and the ranks, and finds the first rank that srun reports as killed."""

    def __init__(self, stream: IO[str]) -> None:
        self.first_killed: Fault | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        for line in self._stream:
            self.first_killed = self.first_killed or killed_rank(line)
            with suppress(OSError):
                sys.stderr.write(printable(line))
                sys.stderr.flush()

    def wait(self) -> None:
        self._thread.join(LAST_LINES_SECONDS)


def killed_rank(line: str) -> Fault | None:
    """Return the fault of a rank that was killed; None for ranks that failed or that srun itself ended."""
    match = re.fullmatch(r"srun: error: (\S+): tasks? ([0-9]+)[0-9,-]*: (.+?)(?: \(core dumped\))?", line.strip())
    if not match or match[3].startswith(("Exited", "Terminated")):
        return None
    what = f"ClusterError: rank {match[2]}: its process was killed from outside (srun: {match[3]})"
    message = f"{what}. Find out what killed it."
    return Fault(KILLED, int(match[2]), match[1], message, ClusterError.exit_code, weight=1)


def record_killed(folder: RunFolder, killed: Fault | None) -> None:
    """Record the rank that srun saw die first, unless the rank recorded an error of its own.

    srun sees all ranks by one clock, and a node's watchdog may have been ended with the last rank there. A watchdog's
    record of the same rank stays, with srun's weight.
    """
    if killed is None:
        return
    known = [fault for fault in read_faults(folder) if fault.rank == killed.rank]
    if all(fault.kind == KILLED for fault in known):
        forget_fault(folder, killed.rank)
        write_fault(folder, replace(known[0], weight=killed.weight) if known else killed)


# A rank


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch, DeepSpeed and `World` read; the user's own settings come through srun.

    Only ranks of a slurm launch use SLURM_PROCID and the like: a `z2all train` in a batch script has them, too.
    """
    numbers = slurm_numbers(environment)
    here = default_environment(int(numbers["LOCAL_WORLD_SIZE"]), environment)
    here.pop("GLOO_SOCKET_IFNAME", None)  # for one machine only
    return {**here, **numbers}


def run_rank() -> int:
    """Run a rank that srun has started."""
    os.environ.update(rank_environment(os.environ))
    from z2all_ds.train import pretrain

    code = pretrain.main()
    logging.shutdown()
    return code
