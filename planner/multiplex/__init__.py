"""Many jobs on many devices: foregrounds under plans, backgrounds in what these leave idle."""
