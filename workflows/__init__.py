"""Flyte workflows and launch plans: composition only."""
