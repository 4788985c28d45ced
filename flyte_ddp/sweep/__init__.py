"""Sweeps: the hyperparameters to try, successive halving of trials by rungs, and the page of results."""
