"""Gradient exchange: buckets, slices by priority, sharded, sparse, and the steps that follow it."""
