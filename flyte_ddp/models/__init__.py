"""Models by name, inputs of models, initial weights, and files of trained models."""
