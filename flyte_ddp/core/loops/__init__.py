"""User-defined functions on the ranks of any launcher: the call, the interface to the rank, and the run."""
