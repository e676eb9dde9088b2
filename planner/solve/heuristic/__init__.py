"""The heuristic search, and what it and the other solvers go by."""
