"""Benchmarks that measure both sides in the same run. ``python -m benchmarks --list`` lists the names."""
