"""Agents: small processes on the nodes, started over ssh, that answer questions and measure connections."""
