"""Flyte's tutorial: the program, and a workflow of it."""
