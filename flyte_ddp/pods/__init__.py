"""Support for tasks in pods, independent of the platform: sizes, variables, folders, retries and checkpoints."""
