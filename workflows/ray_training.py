"""Data set to model on a Ray cluster that Flyte sets up for the run.

Run it with ``pyflyte run workflows/ray_training.py ray_training_wf --hp config/fast.json``.
"""

from workflows.engines import make_training_workflow

globals().update(make_training_workflow("ray", "a Ray cluster"))
