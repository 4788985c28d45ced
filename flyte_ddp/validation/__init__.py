"""Profile a data set, refuse one that should not be trained on, and compare it with the champion's."""
