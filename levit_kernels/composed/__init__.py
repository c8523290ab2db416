"""The ops made of good torch calls, forward and backward: the `torch` backend, and the bar for native kernels."""
