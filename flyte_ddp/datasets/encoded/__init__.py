"""Data sets of encoded images, which are read and decoded when a batch needs them."""
