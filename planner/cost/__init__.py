"""What each decision costs: seconds and bytes of units, edges and collectives."""
