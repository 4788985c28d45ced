"""What a run is: its identity, its folder and the lock on it, its job, its checkpoints."""
