"""Start and supervision of a run's ranks as processes, and the search for the root cause of a failure.

In the launcher, fork_server (on Linux) or rank_handle starts the ranks, and supervisor handles their messages. In each
rank, rank_process.start_rank calls rank.run_rank, which calls the function of the Work.
"""
