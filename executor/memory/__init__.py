"""What a unit's feature maps cost in memory: kept, recomputed or offloaded, and how it is measured."""
