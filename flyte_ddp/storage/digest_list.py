"""``SHA256SUMS``: the files of a folder and their digests, as ``sha256sum`` and ``sha256sum --tag`` write them."""

import codecs
import re

SUMS = "SHA256SUMS"
LINES = (
    re.compile(r"(?P<escaped>\\?)(?P<digest>[0-9a-fA-F]{64}) [ *](?:\./)?(?P<name>.+)"),
    re.compile(r"(?P<escaped>\\?)SHA256 \((?:\./)?(?P<name>.+)\) = (?P<digest>[0-9a-fA-F]{64})"),  # also BSD's command
)
ESCAPED = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}  # in lines that begin with a backslash
SHOWN = 60  # characters of a line


class DigestListError(ValueError):
    """A file is no list of digests, or not in all its lines."""


def read_sums(content: bytes) -> dict[str, str]:
    r"""Return the SHA-256 (hex, small letters) of files by their names.

    The text is UTF-8, whose names may have other bytes in them, or UTF-16 with a byte order mark, as PowerShell writes
    it. Empty lines, and those that begin with "#", are left out. A line that begins with a backslash has a name in
    which \\, \n and \r stand for a backslash and ends of lines.

    Raises:
        DigestListError: any other line, with its number; or a name with a backslash where none stands at the beginning.
    """
    found = {}
    for number, line in enumerate(decoded_text(content).split("\n"), start=1):  # a name may have other ends of lines
        text = line.lstrip().removesuffix("\r")
        if not text or text.startswith("#"):
            continue
        match = next(filter(None, (form.fullmatch(text) for form in LINES)), None)
        if match is None:
            shown = repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")
            raise DigestListError(
                f"line {number} is {shown}, and must be the SHA-256 and the name of a file, as sha256sum writes it"
            )
        name = match["name"]
        if match["escaped"]:
            name = re.sub(r"\\[\\nr]", lambda pair: ESCAPED[pair[0]], name)
        elif "\\" in name:
            raise DigestListError(f"line {number} names {name!r}: folders must be separated by /, not by backslashes")
        found[name] = match["digest"].lower()
    return found


def decoded_text(content: bytes) -> str:
    """Return the text without its byte order mark; bytes that are no UTF-8 become surrogates, as in names of files.

    Raises:
        DigestListError: it begins as UTF-16, and is not.
    """
    if not content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
    try:
        return content.decode("utf-16")
    except UnicodeDecodeError as error:
        raise DigestListError(f"is no text in UTF-16, as which it begins ({error.reason}); write it in UTF-8") from None
