"""Functions of users on the ranks of any launcher: the call, what a rank offers to the function, and its run."""
