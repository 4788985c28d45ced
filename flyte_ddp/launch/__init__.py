"""Launchers: each starts ranks, watches over them, and reports; nothing else."""
