"""See photos.py."""
