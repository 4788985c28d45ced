"""Data sets of encoded images. Images are read and decoded when a batch is loaded."""
