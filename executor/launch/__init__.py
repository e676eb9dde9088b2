"""Starting ranks, what runs on them, and the reports of what they did."""
