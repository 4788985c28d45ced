"""Training in the folder of a test."""

from training_runs import one_thread, train

__all__ = ["one_thread", "train"]
