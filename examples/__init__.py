"""Programs of others on ranks of this library's launchers; README.md lists them."""
