"""Example programs on ranks of this library's launchers. README.md lists the examples."""
