"""Agents: helper processes on the nodes, started over ssh, that answer requests and measure connections."""
