"""Our Triton kernels, one file an op. Importing a file imports triton, so the ops' files do it on first use."""
