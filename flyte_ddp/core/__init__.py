"""What trains exactly and cannot be killed: ranks, runs, launchers, and the training loop, whatever is trained.

All other folders are clients of the core. They define data, models and objectives, and use what a run leaves.
"""
