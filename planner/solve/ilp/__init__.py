"""Provably best plans by an integer program."""
