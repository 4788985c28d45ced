"""Distributed data parallel training in plain PyTorch: the library below the Flyte tasks and workflows."""

__version__ = "0.1.0"
