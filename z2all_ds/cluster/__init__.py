"""The room that starts ranks, by itself on one machine, with the real deepspeed launcher on many, and ends them all.

Who there is: `hostfile`, `nodes`. Ways in: `ssh`, `agents` and the `agent` on each node. What they find: `facts` and
their comparison, connections of every pair (`connections`, `pairs`), `health`; `preflight` puts it together. What is
started: `plan`, `remote` and the `node` process there; `slurm`; `launch`. What goes wrong: the `watchdog` of the ranks,
`verdicts` on all of it. A network where there is none: `overlay`.

It runs without torch: reading a hostfile, choosing a port and watching processes need none, and a login node may have
none.
"""

from z2all_ds.cluster.hostfile import Host, parse_hostfile

__all__ = ["Host", "parse_hostfile"]
