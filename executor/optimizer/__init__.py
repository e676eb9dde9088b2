"""The optimizer's steps: lazy, early and on shards, and the state that follows."""
