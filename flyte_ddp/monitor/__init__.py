"""Compare what the champion predicts now with its held-out samples; record windows, and raise alarms."""
