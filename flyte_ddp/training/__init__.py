"""What one rank does: the main line is train.py, top to bottom."""
