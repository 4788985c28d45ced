"""The training on one rank. The main line is train.py, from top to bottom."""
