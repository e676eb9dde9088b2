"""A step as it is run: what is computed and sent in which order, simulated."""
