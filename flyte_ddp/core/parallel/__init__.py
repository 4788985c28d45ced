"""Make several ranks compute the result of one rank: collectives, gradient strategies, layers over all ranks."""
