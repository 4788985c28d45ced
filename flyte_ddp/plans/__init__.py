"""From hyperparameters to the plan of a training."""
