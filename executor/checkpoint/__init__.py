"""Checkpoints of a run: what is saved, how it lies on disk, and going on from it."""
