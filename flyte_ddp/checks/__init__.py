"""Checks of what users set."""
