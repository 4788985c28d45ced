"""Inputs, parts, checks and files of models, whatever defines them."""
