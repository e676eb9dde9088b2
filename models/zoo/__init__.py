"""Reference workloads by name: the networks of the papers, and small ones to try things on."""

from .catalogue import build, is_known, names

__all__ = ["build", "is_known", "names"]
