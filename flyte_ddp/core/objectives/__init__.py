"""The base class of objectives, and what objectives share."""
