"""Triton kernels, one file per op. Nothing here is imported before the `triton` backend runs its first call."""
