"""Servers and mirrors that fail: what is retried, what is an error, and what the error says."""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from pathlib import Path

import pytest
from file_server import FileServer
from mnist_files import NAMES, Tiny, assert_tiny, leftovers

from flyte_ddp.datasets import DATASETS, fetch, fingerprint
from flyte_ddp.errors import UserError
from flyte_ddp.storage import failures


@pytest.mark.parametrize("fault", [500, 503, 429, 408, "truncate", "alter", "gzip"])
def test_a_fault_that_passes_is_retried(tiny: Tiny, server: FileServer, tmp_path: Path, fault: int | str) -> None:
    """``gzip`` must not even count as a fault: the digest is that of the bytes as they are stored."""
    server.files, server.faults = tiny.files, {NAMES[0]: [fault]}
    assert_tiny(fetch("mnist", server.url, tmp_path / "data", progress="off"), tiny)
    assert server.requests.count(NAMES[0]) == (1 if fault == "gzip" else 2)


@pytest.mark.slow
def test_a_server_that_answers_late_is_asked_again(
    tiny: Tiny, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "READ_TIMEOUT", 0.5)
    server.files, server.faults = tiny.files, {NAMES[1]: ["hang"]}
    assert_tiny(fetch("mnist", server.url, tmp_path / "data", progress="off"), tiny)
    assert server.requests.count(NAMES[1]) == 2


@pytest.mark.parametrize(
    ("fault", "tries", "said"),
    [
        (503, 4, "HTTP 503"),
        (404, 1, "HTTP 404"),
        (403, 1, "HTTP 403"),
        (401, 1, "HTTP 401"),
        ("truncate", 4, "IncompleteRead"),
        ("hang", 4, "no answer within 0.1 s"),
        ("stall", 4, "no answer within 0.1 s"),
        ("alter", 2, "damaged or altered"),
    ],
)
def test_a_fault_that_stays_is_an_error(
    tiny: Tiny,
    server: FileServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: int | str,
    tries: int,
    said: str,
) -> None:
    monkeypatch.setattr(failures, "READ_TIMEOUT", 0.1 if fault in ("hang", "stall") else 5.0)
    server.files, server.faults = tiny.files, {NAMES[2]: [fault] * 9}
    with pytest.raises(UserError) as caught:
        fetch("mnist", server.url, tmp_path / "data", progress="off")
    message = caught.value.message
    assert said in message
    assert server.url in message
    assert NAMES[2] in message
    assert len(message.splitlines()) == 1
    assert server.requests.count(NAMES[2]) == tries
    assert leftovers(tmp_path) == []


def test_an_altered_file_is_named_with_both_digests_and_the_fix(tiny: Tiny, tmp_path: Path) -> None:
    mirror = tiny.write(tmp_path / "mirror")
    altered = tiny.files[NAMES[3]][:-1]
    (mirror / NAMES[3]).write_bytes(altered)
    with pytest.raises(UserError) as caught:
        fetch("mnist", str(mirror), tmp_path / "data", progress="off")
    assert hashlib.md5(altered).hexdigest() in caught.value.message
    assert tiny.dataset.files[3].md5 in caught.value.message
    assert NAMES[3] in caught.value.message
    assert "sha256sum * > SHA256SUMS" in caught.value.message
    assert leftovers(tmp_path) == ["mirror"]


def test_the_next_public_address_is_asked_when_one_fails(
    tiny: Tiny, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = (f"{server.url}/gone", server.url)
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(tiny.dataset, addresses=addresses))
    server.files = tiny.files
    assert_tiny(fetch("mnist", "", tmp_path / "data", progress="off"), tiny)


def test_a_damaged_system_copy_gives_way_to_the_public_address(
    tiny: Tiny, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tiny.write(tmp_path / "system")
    (system / NAMES[0]).write_bytes(b"damaged")
    dataset = dataclasses.replace(tiny.dataset, addresses=(server.url,), system_folder=str(system))
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    server.files = tiny.files
    assert_tiny(fetch("mnist", "", tmp_path / "data", progress="off"), tiny)
    assert server.requests == [NAMES[0]]


def test_all_public_addresses_failing_names_each_with_its_reason(
    tiny: Tiny, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataclasses.replace(tiny.dataset, addresses=(f"{server.url}/one", f"{server.url}/two"))
    monkeypatch.setitem(DATASETS, "mnist", dataset)
    with pytest.raises(UserError, match=r"/one/.*HTTP 404.*/two/.*HTTP 404.*data_source"):
        fetch("mnist", "", tmp_path / "data", progress="off")


def test_a_given_mirror_is_the_only_place_asked(
    tiny: Tiny, server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(tiny.dataset, addresses=(server.url,)))
    server.files = tiny.files
    (tmp_path / "mirror").mkdir()
    with pytest.raises(UserError, match=r"mirror'.*has no train-images"):
        fetch("mnist", str(tmp_path / "mirror"), tmp_path / "data", progress="off")
    assert server.requests == []


def test_an_unreachable_mirror_is_an_error_already_at_the_fingerprint(tiny: Tiny) -> None:
    del tiny
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(UserError, match=r"127\.0\.0\.1.*Connection refused.*check the address"):
            fingerprint("mnist", address)
