"""The version of this library, which need not be an installed package: pods may get a copy of it."""

VERSION = "0.1.0"
