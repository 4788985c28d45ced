"""Pages that need nothing else: a run's report, and what the Flyte console shows of other tasks."""
