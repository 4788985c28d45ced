"""Models by name, what they are fed, the weights that they start from, and the files that they are saved to."""
