"""What a model is made of: the workload that is trained, and the units it is cut into."""
