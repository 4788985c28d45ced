"""Models by name, their input, their initial weights, and the files of trained models."""
