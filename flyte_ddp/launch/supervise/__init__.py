"""The ranks of a run as processes: how they start, who watches over them, and who is to blame.

In the launcher: fork_server (on Linux) or rank_handle starts them, and supervisor listens. In each rank:
rank_process.start_rank, rank.run_rank, then the function of the Work.
"""
