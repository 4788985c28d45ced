"""What makes several ranks compute what one would: collectives, strategies, and layers that depend on all ranks."""
