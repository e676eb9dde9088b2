"""What becomes of feature maps: kept, recomputed or offloaded; and the measure of peak memory.

When they are there is stated in [Note: The memory timeline] in planner/memory/timeline.py.
"""
