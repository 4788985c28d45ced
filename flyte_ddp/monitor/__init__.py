"""Compares windows of new samples with the champion's held-out samples, records the windows, and raises alarms."""
