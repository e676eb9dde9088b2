"""Reference workloads by name: the networks of the papers, and small ones to try things on."""

from .catalogue import build, names

__all__ = ["build", "names"]
