"""Format texts, write and read JSON lines, and describe sections of reports."""
