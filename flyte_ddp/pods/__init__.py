"""What runs in the pods of a cluster, whatever starts them: sizes, variables, folders, retries, checkpoints."""
