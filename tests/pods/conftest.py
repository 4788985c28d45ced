"""A store of checkpoints in a real S3 server, for each test a run of its own."""

from kept_checkpoints import base, server, store

__all__ = ["base", "server", "store"]
