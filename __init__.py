"""Meshwright decides how to train a PyTorch model on the machines at hand, and runs it so.

Public names load lazily, so that ``import meshwright.planner`` never loads torch.
"""
