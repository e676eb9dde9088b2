"""What is trained: reference workloads, the units of a model, and how units divide."""
