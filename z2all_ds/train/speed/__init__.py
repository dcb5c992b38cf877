"""Choices that make steps faster: compiled layers, CUDA graphs, CPU binding, fewer imports."""
