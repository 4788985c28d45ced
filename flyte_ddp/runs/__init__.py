"""A run's identity, its folder with the lock, its job for the ranks, and its checkpoints."""
