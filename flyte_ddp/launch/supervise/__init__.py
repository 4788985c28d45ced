"""The ranks of a run as processes: how they start, who watches over them, and who is to blame."""
