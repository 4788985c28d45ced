"""The work of the tasks of every front, on local paths: tasks/ adds the types and options of Flyte."""
