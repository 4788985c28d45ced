"""Data sets larger than memory: tar files (shards) of samples, described by one index, in wids' format.

An index names the shards with their sizes, digests and numbers of samples. Shards are cached whole and read at random.
"""
