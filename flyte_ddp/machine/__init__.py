"""What this machine has, and its processes, devices and clocks."""
