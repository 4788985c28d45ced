"""Start and supervision of a run's ranks as processes, and the search for the root cause of a failure.

In the launcher, rank_starter starts the ranks, and supervisor handles their messages (messages.py). In each rank,
rank_process.start_rank calls rank.run_rank, which calls the function of the Work.
"""
