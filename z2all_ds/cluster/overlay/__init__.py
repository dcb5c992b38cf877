"""Overlay networks between nodes that cannot reach each other directly."""
