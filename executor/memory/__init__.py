"""What becomes of feature maps: kept, recomputed or offloaded; and the measure of peak memory."""
