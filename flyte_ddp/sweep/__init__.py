"""Sweeps: which hyperparameters are tried, how trials go on from rung to rung, and the page that shows them."""
