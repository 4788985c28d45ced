"""Tracks a run in wandb by a child process, whose failures do not affect training."""
