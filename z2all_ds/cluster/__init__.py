"""Several nodes: a hostfile or YAML names them, `ssh` reaches them. Runs without torch, for login nodes.

`agents` answer questions on the nodes, `preflight` compares and tests the nodes before a launch, `launch` starts,
watches and restarts ranks on them, `overlay` gives them a private network, `doctor` checks one machine.
"""

from z2all_ds.cluster.hostfile import Host, parse_hostfile

__all__ = ["Host", "parse_hostfile"]
