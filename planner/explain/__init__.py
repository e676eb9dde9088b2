"""What a plan is asked afterwards: why it is so, what binds it, what more would buy."""
