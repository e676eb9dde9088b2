"""Plans with a proven bound for many units on many ranks, by the Lagrangian of the rows."""
