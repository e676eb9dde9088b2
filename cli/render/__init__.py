"""What people see: tables of plans, runs and memory, plots, and the console they go to."""
