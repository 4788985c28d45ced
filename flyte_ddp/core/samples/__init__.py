"""The parts of samples: leaves, pictures and class names."""
