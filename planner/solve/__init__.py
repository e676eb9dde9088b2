"""What a problem is, what may be decided, and what a set of decisions amounts to."""
