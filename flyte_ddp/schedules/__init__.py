"""The file of schedules (config/schedules.yaml), and users' YAML in general, also on the command line."""
