"""Pages that need nothing else, such as a run's report."""
