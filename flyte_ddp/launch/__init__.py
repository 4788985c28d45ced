"""Launchers, one file each; default chooses between the two of one machine, single and spawn.

``launch(work)`` finds the World for the work's request, and returns when all ranks have completed. The World is that of
``machine/resources.detect_world`` on one machine, else of the launcher's own ``find_world``. For what a launcher
of another engine must do see :mod:`flyte_ddp.launch.remote`.

All launchers raise:
    UserError: the user's mistake, as the rank that failed first reported it.
    UnreachableError: there is no cluster, it has too few workers, or its hosts cannot reach this one.
    RankError: any other failure of the rank that failed first.
    StoppedError: this process or a rank got SIGTERM.
    KeyboardInterrupt: this process got Ctrl-C.
"""
