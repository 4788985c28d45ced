"""``SHA256SUMS``: the files of a folder and their digests, as the command ``sha256sum`` writes them."""

from __future__ import annotations

import re

SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def read_sums(content: bytes) -> dict[str, str]:
    """SHA-256 (hex, small letters) of files by their names; lines that are none are passed over."""
    lines = content.decode("utf-8", "surrogateescape").splitlines()
    return {match[2]: match[1].lower() for line in lines if (match := LINE.fullmatch(line.strip()))}
