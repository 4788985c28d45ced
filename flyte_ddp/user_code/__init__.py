"""The code that users give: named functions, its source, and digests of it and of this library."""
