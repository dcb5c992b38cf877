"""Triton kernels, one file per op. Importing a file imports triton, so the ops import them on first use."""
