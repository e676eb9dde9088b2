"""Forms of a divided tensor: slices of parameters and gradients, and moves between the forms."""
