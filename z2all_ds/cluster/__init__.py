"""The room that starts ranks, by itself on one machine, with the real deepspeed launcher on many, and ends them all.

It runs without torch: reading a hostfile, choosing a port and watching processes need none, and a login node may have
none.
"""

from z2all_ds.cluster.hostfile import Host, parse_hostfile

__all__ = ["Host", "parse_hostfile"]
