"""Checks of all nodes before a launch: same software, working connections, healthy devices."""
