"""Data set to model on torch Elastic, in a single pod or several.

Run it with ``pyflyte run workflows/elastic_training.py elastic_training_wf --hp config/fast.json``.
"""

from workflows.engines import make_training_workflow

globals().update(make_training_workflow("elastic", "torch Elastic"))
