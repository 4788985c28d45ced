"""Data set to model on a Dask cluster that Flyte sets up for the run.

Run it with ``pyflyte run workflows/dask_training.py dask_training_wf --hp config/fast.json``.
"""

from workflows.engines import make_training_workflow

globals().update(make_training_workflow("dask", "a Dask cluster"))
