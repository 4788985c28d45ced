"""All tasks with their triggers, for ``flyte deploy flyte2/deployment.py tasks``."""

from flyte2 import elastic_training, monitor, prediction, release, shards, sweep, training
from flyte2.pods import CHECKS

__all__ = ["elastic_training", "monitor", "prediction", "release", "shards", "sweep", "tasks", "training"]

tasks = CHECKS  # which depends on the other environments
