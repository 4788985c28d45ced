"""Training in the folder of a test."""

from training_runs import train

__all__ = ["train"]
