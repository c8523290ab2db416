"""Who computes an op: see registry.py for the choice, the other files for one backend each."""

from .registry import BackendError, choose, run, use_backend

__all__ = ["BackendError", "choose", "run", "use_backend"]
