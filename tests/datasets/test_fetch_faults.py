"""Servers and mirrors that fail: what is retried, what is an error, and what the error says."""

import dataclasses
import hashlib
import socket
from pathlib import Path

import pytest
from file_server import FileServer
from mnist_files import NAMES, Tiny, assert_tiny, leftovers

from flyte_ddp.datasets import DATASETS, fetch, fingerprint
from flyte_ddp.errors import UserError


@pytest.mark.parametrize("fault", [503, "truncate", "alter", "gzip"])
def test_a_fault_that_passes_is_retried(tiny: Tiny, server: FileServer, tmp_path: Path, fault: int | str) -> None:
    """``gzip`` must not even count as a fault: the digest is that of the bytes as they are stored."""
    server.files, server.faults = tiny.files, {NAMES[0]: [fault]}
    assert_tiny(fetch("mnist", server.url, tmp_path / "data", progress="off"), tiny)
    assert server.requests.count(NAMES[0]) == (1 if fault == "gzip" else 2)


@pytest.mark.parametrize(
    ("fault", "tries", "said"),
    [(503, 4, "HTTP 503"), (404, 1, "HTTP 404"), ("truncate", 4, "IncompleteRead"), ("alter", 2, "damaged or altered")],
)
def test_a_fault_that_stays_is_an_error(
    tiny: Tiny, server: FileServer, tmp_path: Path, fault: int | str, tries: int, said: str
) -> None:
    server.files, server.faults = tiny.files, {NAMES[2]: [fault] * 9}
    with pytest.raises(UserError) as caught:
        fetch("mnist", server.url, tmp_path / "data", progress="off")
    assert all(part in caught.value.message for part in (said, server.url, NAMES[2]))
    assert len(caught.value.message.splitlines()) == 1
    assert server.requests.count(NAMES[2]) == tries
    assert leftovers(tmp_path) == []


def test_an_altered_file_is_named_with_both_digests_and_the_fix(tiny: Tiny, tmp_path: Path) -> None:
    mirror = tiny.write(tmp_path / "mirror")
    altered = tiny.files[NAMES[3]][:-1]
    (mirror / NAMES[3]).write_bytes(altered)
    with pytest.raises(UserError) as caught:
        fetch("mnist", str(mirror), tmp_path / "data", progress="off")
    digests = hashlib.md5(altered).hexdigest(), *tiny.dataset.files[NAMES[3]]
    assert all(part in caught.value.message for part in (*digests, NAMES[3], "sha256sum * > SHA256SUMS"))
    assert leftovers(tmp_path) == ["mirror"]


def test_public_addresses_are_tried_one_after_another_unless_a_mirror_is_given(
    tiny: Tiny, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tiny.write(tmp_path / "system")
    (system / NAMES[0]).write_bytes(b"damaged")
    addresses = (f"{server.url}/gone", server.url)
    dataset = dataclasses.replace(tiny.dataset, addresses=addresses, system_folder=str(system))
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    with pytest.raises(UserError, match=rf"/gone/.*HTTP 404.*{server.url}/train.*HTTP 404.*data_source"):
        fetch("mnist", "", tmp_path / "data", progress="off")
    server.files = tiny.files
    server.requests.clear()
    assert_tiny(fetch("mnist", "", tmp_path / "data", progress="off"), tiny)
    assert server.requests == [f"gone/{NAMES[0]}", NAMES[0]]
    server.requests.clear()
    (tmp_path / "mirror").mkdir()
    with pytest.raises(UserError, match=f"mirror'.*has no {NAMES[0]} .*must hold {', '.join(NAMES)}"):
        fetch("mnist", str(tmp_path / "mirror"), tmp_path / "other", progress="off")
    assert server.requests == []


@pytest.mark.usefixtures("tiny")
def test_an_unreachable_mirror_is_an_error_already_at_the_fingerprint() -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(UserError, match=r"127\.0\.0\.1.*Connection refused.*check the address"):
            fingerprint("mnist", address)
