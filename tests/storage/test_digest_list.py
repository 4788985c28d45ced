"""SHA256SUMS as many programs write it, and what is none."""

import pytest
from file_server import FileServer

from flyte_ddp.datasets import fingerprint
from flyte_ddp.datasets.image_folder import list_images
from flyte_ddp.errors import UserError
from flyte_ddp.storage.digest_list import DigestListError, parse_digest_list

ONE, TWO = "0" * 64, "ab" * 32
PLAIN = f"{ONE}  ant/1.jpg\n{TWO}  bee/2 é.jpg\n"


WRITTEN = {
    "sha256sum": PLAIN.encode(),
    "a byte order mark": PLAIN.encode("utf-8-sig"),
    "PowerShell": PLAIN.replace("\n", "\r\n").encode("utf-16"),
    "UTF-16, big-endian": b"\xfe\xff" + PLAIN.encode("utf-16-be"),
    "BSD": f"SHA256 (ant/1.jpg) = {ONE}\nSHA256 (./bee/2 é.jpg) = {TWO}".encode(),
    "binary, capitals": PLAIN.replace("  ", " *./").replace("ab", "AB").encode(),
    "remarks": f"# by us\n\n{PLAIN}\n \n".encode(),
}


@pytest.mark.parametrize("content", WRITTEN.values(), ids=WRITTEN)
def test_lists_as_programs_write_them(content: bytes) -> None:
    assert parse_digest_list(content) == {"ant/1.jpg": ONE, "bee/2 é.jpg": TWO}


REFUSED = {
    "a login page": (b"\n<!DOCTYPE html>\n<html>", r"line 2 is '<!DOCTYPE html>', and must be the"),
    "a page on one line": (b"<html>" + b"x" * 5000, r"line 1 is '<html>x{54}'\.\.\., and must be"),
    "MD5": (PLAIN.encode() + b"0" * 32 + b"  x.jpg\n", r"line 3 is '0{32}  x\.jpg', and must be the SHA-256"),
    "another digest": (f"MD5 (ant/1.jpg) = {'0' * 32}".encode(), r"line 1 is 'MD5 \(ant/1.jpg\)"),
    "no name": (f"{ONE}  ".encode(), "line 1 is '0{60}'"),
    "UTF-16 without a mark": (PLAIN.encode("utf-16-le"), r"line 1 is '0\\x000\\x00"),
    "half of UTF-16": (PLAIN.encode("utf-16")[:-1], r"begins as UTF-16, but is not UTF-16 .*write it in UTF-8"),
    "Windows' folders": (f"{ONE}  a\\1.jpg\n".encode(), r"line 1 names 'a\\\\1\.jpg': folders must be separated by /"),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_refused_with_the_line(content: bytes, said: str) -> None:
    with pytest.raises(DigestListError, match=f"^{said}"):
        parse_digest_list(content)


def test_what_is_not_understood_is_said_to_who_lists_a_folder(server: FileServer) -> None:
    server.files["data/SHA256SUMS"], line = REFUSED["a login page"]
    with pytest.raises(UserError, match=rf"cannot be listed \(SHA256SUMS in that folder is not understood: {line}"):
        list_images(f"{server.url}/data")
    with pytest.raises(UserError, match=rf"data_source='http://.*': SHA256SUMS there is not understood: {line}"):
        fingerprint("mnist", f"{server.url}/data")
