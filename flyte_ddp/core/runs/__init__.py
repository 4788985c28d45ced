"""Identity, locked folder, work and checkpoints of a run."""
