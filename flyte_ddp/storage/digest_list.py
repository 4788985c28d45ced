"""``SHA256SUMS``: the files of a folder and their digests, as the command ``sha256sum`` writes them."""

from __future__ import annotations

import re

SUMS = "SHA256SUMS"
LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
ESCAPED = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}  # in lines that begin with a backslash


def read_sums(content: bytes) -> dict[str, str]:
    """SHA-256 (hex, small letters) of files by their names; lines that are none are passed over."""
    found = {}
    for line in content.decode("utf-8", "surrogateescape").split("\n"):  # a name may have other ends of lines in it
        if match := LINE.fullmatch(line.lstrip().removesuffix("\r")):
            escaped, digest, name = match.groups()
            if escaped:
                name = re.sub(r"\\[\\nr]", lambda pair: ESCAPED[pair[0]], name)
            found[name] = digest.lower()
    return found
