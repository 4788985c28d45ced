"""A run's identity, its folder with the lock, its work for the ranks, and its checkpoints."""
