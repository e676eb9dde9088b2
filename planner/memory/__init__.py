"""What a rank holds at each point of a step."""
