"""Data sets larger than memory: tar files (shards) of samples, described by an index in wids' format.

An index lists the shards with sizes, digests and numbers of samples. Shards are cached whole and read at random.
"""
