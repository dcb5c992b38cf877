"""Speed options: compiled layers, CUDA graphs, CPU binding, fewer imports."""
