"""The version of this library. The library need not be installed as a package, because pods may get a copy."""

VERSION = "0.1.0"
