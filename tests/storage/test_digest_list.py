"""SHA256SUMS as many programs write it, and what is none."""

import pytest
from file_server import FileServer

from flyte_ddp import storage
from flyte_ddp.datasets import fingerprint
from flyte_ddp.datasets.image_folder import list_images
from flyte_ddp.errors import UserError
from flyte_ddp.storage import UnavailableError
from flyte_ddp.storage.digest_list import DigestListError, parse_digest_list

ONE, TWO = "0" * 64, "ab" * 32
PLAIN = f"{ONE}  ant/1.jpg\n{TWO}  bee/2 é.jpg\n"
EXPECTED = {"ant/1.jpg": ONE, "bee/2 é.jpg": TWO}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(PLAIN.encode(), id="sha256sum"),
        pytest.param(PLAIN.encode("utf-8-sig"), id="a byte order mark"),
        pytest.param(PLAIN.replace("\n", "\r\n").encode("utf-16"), id="PowerShell"),
        pytest.param(b"\xfe\xff" + PLAIN.encode("utf-16-be"), id="UTF-16, big-endian"),
        pytest.param(f"SHA256 (ant/1.jpg) = {ONE}\nSHA256 (./bee/2 é.jpg) = {TWO}".encode(), id="BSD"),
        pytest.param(PLAIN.replace("  ", " *./").replace("ab", "AB").encode(), id="binary, capitals"),
        pytest.param(f"# by us\n\n{PLAIN}\n \n".encode(), id="remarks"),
    ],
)
def test_lists_as_programs_write_them(content: bytes) -> None:
    assert parse_digest_list(content) == EXPECTED


REFUSED = {
    "a login page": (
        b"\n<!DOCTYPE html>\n<html><title>Log in</title>",
        r"line 2 is '<!DOCTYPE html>', and must be the",
    ),
    "a page on one line": (b"<html>" + b"x" * 5000, r"line 1 is '<html>x{54}'\.\.\., and must be"),
    "MD5": (PLAIN.encode() + b"0" * 32 + b"  x.jpg\n", r"line 3 is '0{32}  x\.jpg', and must be the SHA-256"),
    "another digest": (f"MD5 (ant/1.jpg) = {'0' * 32}".encode(), r"line 1 is 'MD5 \(ant/1.jpg\)"),
    "no name": (f"{ONE}  ".encode(), "line 1 is '0{60}'"),
    "UTF-16 without a mark": (PLAIN.encode("utf-16-le"), r"line 1 is '0\\x000\\x00"),
    "half of UTF-16": (PLAIN.encode("utf-16")[:-1], r"begins as UTF-16, but is not UTF-16 .*write it in UTF-8"),
    "Windows' folders": (
        f"{ONE}  ant\\1.jpg\n".encode(),
        r"line 1 names 'ant\\\\1\.jpg': folders must be separated by /",
    ),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_understood_is_refused_with_the_line(content: bytes, said: str) -> None:
    with pytest.raises(DigestListError, match=f"^{said}"):
        parse_digest_list(content)


def test_what_is_not_understood_is_said_to_who_lists_a_folder(server: FileServer) -> None:
    content, said = REFUSED["a login page"]
    server.files = {"data/SHA256SUMS": content}
    with pytest.raises(UnavailableError, match=f"^SHA256SUMS in that folder is not understood: {said}"):
        list(storage.list_files(f"{server.url}/data"))
    with pytest.raises(UserError, match=rf"image folder http://.*: cannot be listed \(SHA256SUMS .*{said}"):
        list_images(f"{server.url}/data")
    with pytest.raises(UserError, match=rf"data_source='http://.*': SHA256SUMS there is not understood: {said}"):
        fingerprint("mnist", f"{server.url}/data")
