"""Judgement of trained models against the champion, and the registry of versions and champions."""
