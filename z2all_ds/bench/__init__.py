"""Measures speed and memory for `z2all bench`."""
