"""Parse ``SHA256SUMS``: the files of a folder with their digests, as ``sha256sum`` writes it."""

import re

SUMS = "SHA256SUMS"
LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?:\./)?(?P<name>.+)")


class DigestListError(ValueError):
    """A line of a file is not a digest with a file's name."""


def parse_digest_list(content: bytes) -> dict[str, str]:
    """Return each file's SHA-256 (hex, lower case) by name from a ``SHA256SUMS``; DigestListError if malformed."""
    digests = {}
    text = content.decode("utf-8-sig", "surrogateescape")
    for line in (line.lstrip().removesuffix("\r") for line in text.split("\n")):  # a name may contain "\r"
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise DigestListError(f"{line[:60]!r} must be the SHA-256 and the name of a file, as sha256sum writes it")
        digests[match["name"]] = match["digest"].lower()
    return digests
