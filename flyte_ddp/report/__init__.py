"""Self-contained HTML pages, such as a run's report."""
