"""Frameworks that have a training loop of their own, and what they do to a planned model."""
