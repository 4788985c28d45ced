"""What samples consist of: leaves, pictures, names of classes."""
