"""Texts, lines of JSON and sections of files."""
