"""Resources, processes, devices and clocks of this machine."""
