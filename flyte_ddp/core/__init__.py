"""What trains exactly and cannot be killed: ranks, runs, launchers, and the training loop, whatever is trained.

All other folders are clients of the core. Clients define data, models and objectives, and read a run's files.
"""
