"""Profiles a data set, rejects unsuitable data before training, and compares the data with the champion's."""
