"""The optimizer's steps: which can be, lazy, early and on shards, and the state that follows."""
