"""Checks of values and files that users give."""
