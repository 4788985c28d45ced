"""Launchers, in one module each. ``default`` chooses between ``single`` and ``spawn``, the launchers of one machine.

``launch(work)`` finds the World for the work's request, and returns when all ranks have completed. On one machine the
World comes from ``machine/resources.detect_world``, else from the launcher's ``plan_world``.
:mod:`flyte_ddp.core.launch.engine` describes how to write a launcher for another engine.

All launchers raise:
    UserError: The user's mistake, as reported by the rank that failed first.
    UnreachableError: The cluster does not exist, has too few workers, or has hosts that cannot reach this host.
    RankError: Any other failure of the rank that failed first.
    StoppedError: This process or a rank got SIGTERM.
    KeyboardInterrupt: This process got Ctrl-C.
"""
