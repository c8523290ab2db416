"""Benchmarks of both packages: `python -m bench`, `python -m bench --bars`, `pytest bench --benchmark-only`."""
