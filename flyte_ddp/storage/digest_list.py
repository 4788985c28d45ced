"""Parse ``SHA256SUMS``: the files of a folder with their digests, as ``sha256sum`` writes it."""

import re

SUMS = "SHA256SUMS"
LINE = re.compile(r"(?P<escaped>\\?)(?P<digest>[0-9a-fA-F]{64}) [ *](?:\./)?(?P<name>.+)")
ESCAPED = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}  # in lines that begin with a backslash
SHOWN = 60  # characters of a line in an error


class DigestListError(ValueError):
    """A line of a file is not a digest with a file's name."""


def parse_digest_list(content: bytes) -> dict[str, str]:
    """Parse the content of a ``SHA256SUMS`` and return the SHA-256 (hex, lower case) of each file by its name.

    The text is UTF-8; other bytes become surrogates, as in ``os.fsdecode``. Skips empty lines and lines that begin with
    "#". Raises DigestListError for a line of another form.
    """
    text = content.decode("utf-8-sig", "surrogateescape")
    digests = {}
    lines = [line.lstrip().removesuffix("\r") for line in text.split("\n")]  # not splitlines: a name may contain "\r"
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            shown = repr(line[:SHOWN]) + ("..." if len(line) > SHOWN else "")
            raise DigestListError(
                f"line {number} is {shown}, and must be the SHA-256 and the name of a file, as sha256sum writes it"
            )
        name = match["name"]
        if match["escaped"]:
            name = re.sub(r"\\[\\nr]", lambda pair: ESCAPED[pair[0]], name)
        elif "\\" in name:
            raise DigestListError(f"line {number} names {name!r}: folders must be separated by /, not by backslashes")
        digests[name] = match["digest"].lower()
    return digests
