"""Benchmarks that measure both sides in one run; ``python -m benchmarks --list`` names them."""
