"""Plans how to train a model on a cluster. Pure: no torch, no files beyond JSON, no processes."""
