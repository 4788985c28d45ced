"""User code: named callables, sources, and digests of user code and of this library."""
