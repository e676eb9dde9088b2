"""What becomes of feature maps: kept, recomputed or offloaded.

When they are there is stated in [Note: The memory timeline] in planner/memory/timeline.py.
"""
