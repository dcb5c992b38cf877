"""Training on several nodes: hostfile, checks of nodes, launch and restarts. Works without torch, for login nodes.

`agents` are helper processes on the nodes, `preflight` checks all nodes before a launch, `launch` starts and watches
the ranks, `overlay` creates a private network between nodes, `doctor` checks one machine.
"""
