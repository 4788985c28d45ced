"""Launchers: single, spawn, elastic, ray and dask, one file each.

Each has ``launch(job, *, num_ranks)``, which starts the ranks, supervises them, and returns when all have completed.

Raises:
    UserError: the user's mistake, as the rank that failed first reported it.
    UnreachableError: there is no cluster, it has too few workers, or its hosts cannot reach this one.
    RankError: any other failure of a rank, named by the rank that failed first.
    StoppedError: the process got SIGTERM; for Ctrl-C it is a KeyboardInterrupt.
"""
