"""What users and the other rooms speak of: plan, profile, cluster, goal, layouts, options."""
