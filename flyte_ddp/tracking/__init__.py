"""Track a run in wandb, in a process of its own: its failures do not affect training."""
