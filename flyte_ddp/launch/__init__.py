"""Launchers: single, spawn, elastic, ray and dask, one file each.

``launch(work)`` returns when all ranks have completed. Each finds
the World for the work's request: ``machine.detect_world`` on one machine, else its own ``find_world``.

All launchers raise:
    UserError: the user's mistake, as the rank that failed first reported it.
    UnreachableError: there is no cluster, it has too few workers, or its hosts cannot reach this one.
    RankError: any other failure of the rank that failed first.
    StoppedError: this process or a rank got SIGTERM.
    KeyboardInterrupt: this process got Ctrl-C.
"""
