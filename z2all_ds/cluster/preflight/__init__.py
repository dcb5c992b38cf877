"""Checks of all nodes before a launch: the same software, working connections, healthy devices."""
