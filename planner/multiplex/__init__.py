"""Many jobs on many devices: foregrounds under their plans, backgrounds in what these leave idle."""
