"""The registry's log: one winner for each number, whoever is killed and whatever is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import HELPERS, ROOT
from faulty_proxy import faulty_proxy
from locking_proxy import Locking
from s3_server import S3Server

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.release.registry import Entry, LostError, Registry


def appended(registry: Registry, before: Entry | None, who: str = "somebody") -> Entry:
    values: dict[str, Any] = {"version": who, "manifest": "m", "best": who, "reason": "why not"}
    return registry.append(before, by=who, action="promote", **values)


def raced(address: str, processes: int, rounds: int) -> None:
    """So many processes want to write each entry."""
    script = [sys.executable, str(HELPERS / "promoter.py"), "race", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen([*script, f"process {number}", str(rounds)], env=environment, stdout=subprocess.PIPE)
        for number in range(processes)
    ]
    said = [[json.loads(line) for line in process.communicate()[0].splitlines()] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    log = Registry(address, "model").history()
    assert [entry.number for entry in log] == [*range(1, rounds + 1)]
    for number, entry in enumerate(log):
        of_all = [lines[number] for lines in said]
        assert [line["winner"] for line in of_all] == [entry.by] * processes
        [winner] = [place for place, line in enumerate(of_all) if line["won"]]
        assert f"process {winner}" == entry.by
        losers = [line for line in of_all if not line["won"]]
        assert all(line["said"].startswith(f"{entry.by} was faster: by entry {number + 1} ") for line in losers)


@pytest.mark.slow
def test_of_some_who_want_the_next_entry_one_gets_it(address: str) -> None:
    raced(address, 4, 8)


@pytest.mark.exhaustive
def test_of_many_who_want_the_next_entry_one_gets_it(address: str) -> None:
    raced(address, 20, 50)


def test_a_store_that_replaces_files_is_refused(
    s3: tuple[S3Server, Locking], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tests' S3 server is without the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3[0].endpoint)
    with pytest.raises(UserError, match=r"its store ignores If-None-Match, so that two promotions .* take one that"):
        appended(Registry(bucket, "model"), None)
    assert not Registry(bucket, "model").history()


def test_a_lost_answer_to_its_own_write_is_no_defeat(s3: tuple[S3Server, Locking], bucket: str) -> None:
    s3[1].lost.append(f"{bucket.removeprefix('s3://')}/model/log/00000001.json")
    assert appended(Registry(bucket, "model"), None).number == 1
    assert not s3[1].lost


def test_a_conflict_is_tried_again(s3: tuple[S3Server, Locking], bucket: str) -> None:
    s3[1].conflicts.append(f"{bucket.removeprefix('s3://')}/model/log/00000001.json")
    assert appended(Registry(bucket, "model"), None).number == 1
    assert not s3[1].conflicts


def test_the_winner_is_named(address: str) -> None:
    registry = Registry(address, "model")
    first = appended(registry, None, "one")
    with pytest.raises(LostError, match=r"one was faster: by entry 1 of the log version one is the champion \(why not"):
        appended(registry, None, "other")
    assert registry.champion() == first
    assert json.loads(storage.read(registry.at("champion.json")))["version"] == "one"


def test_a_copy_that_cannot_be_written_costs_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry(str(tmp_path), "model")
    Path(registry.at("champion.json")).mkdir(parents=True)
    assert appended(registry, None).number == 1
    assert "not renewed: [Errno 21] Is a directory" in capsys.readouterr().out


@pytest.mark.parametrize("gone", [1, 2])
def test_a_deleted_entry_is_named(tmp_path: Path, gone: int) -> None:
    registry = Registry(str(tmp_path), "model")
    appended(registry, appended(registry, appended(registry, None)))
    (tmp_path / f"model/log/0000000{gone}.json").unlink()
    with pytest.raises(UserError, match=f"model/log/0000000{gone}.json is missing, and 0000000{gone + 1}.json is"):
        registry.history()


def moved_away(registry: Registry, server: S3Server, *parts: str) -> None:
    """Takes a file of a registry away, as a rule of a bucket's lifecycle does."""
    address = registry.at(*parts)
    (storage.local_path(address) or server.folder / address.removeprefix("s3://")).unlink()


def test_the_champion_is_read_without_the_entries_before_it(address: str, s3: tuple[S3Server, Locking]) -> None:
    """Who promotes needs all of them."""
    registry = Registry(address, "model")
    last = appended(registry, appended(registry, appended(registry, None)))
    moved_away(registry, s3[0], "log", "00000001.json")
    assert registry.champion() == last
    with pytest.raises(UserError, match=r"model/log/00000001.json is missing, and 00000002.json is there; restore it"):
        registry.history()
    moved_away(registry, s3[0], "log", "00000003.json")
    with pytest.raises(UserError, match=r"log/00000003.json is missing or was altered, as champion.json is another"):
        registry.champion()


def test_a_right_that_is_missing_is_named(
    s3: tuple[S3Server, Locking], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a file that is not there: champion.json, which protects the log's end, would be left out."""
    registry = Registry(bucket, "model")
    entry = appended(registry, None)
    name = bucket.removeprefix("s3://")
    with faulty_proxy(s3[0].endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert registry.champion() == entry
        proxy.denied = (f"{name}/model/champion.json",)
        said = r"model cannot be read: HTTP 403 AccessDenied: the right to read it \(s3:GetObject\) is missing; check"
        with pytest.raises(UserError, match=said):
            registry.champion()
        proxy.denied, proxy.lists = (), False
        with pytest.raises(
            UserError, match=r"cannot be listed: HTTP 403 .* to list .* \(s3:ListBucket\) is missing; check"
        ):
            registry.champion()


def test_an_altered_entry_is_named(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "model")
    appended(registry, appended(registry, None))
    entry = tmp_path / "model/log/00000001.json"
    entry.write_text(entry.read_text().replace("somebody", "nobody"))
    with pytest.raises(UserError, match=r"model/log/00000002.json does not follow the entry before it"):
        registry.history()
    entry.write_text("{")
    with pytest.raises(UserError, match=r"00000001.json: is damaged; restore it"):
        registry.history()


def test_the_last_entry_is_protected_by_its_copy(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path), "model")
    appended(registry, appended(registry, None))
    entry = tmp_path / "model/log/00000002.json"
    content = entry.read_text()
    said = r"model/log/00000002.json is missing or was altered, as champion.json is another one; restore it"
    entry.write_text(content.replace("somebody", "nobody"))
    with pytest.raises(UserError, match=said):
        registry.history()
    entry.unlink()
    with pytest.raises(UserError, match=said):
        registry.history()
    entry.write_text(content)
    assert len(registry.history()) == 2
    copy = tmp_path / "model/champion.json"
    copy.write_text((tmp_path / "model/log/00000001.json").read_text())  # a late one
    assert len(registry.history()) == 2
    for altered in ("{}", "[]", content.replace('"number": 2', '"number": "3"')):
        copy.write_text(altered)
        assert len(registry.history()) == 2
    (tmp_path / "model/log/notes.txt").write_text("is no entry")
    assert len(registry.history()) == 2


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "a" * 101, "models\n"])
def test_a_name_that_is_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be letters, digits"):
        Registry(str(tmp_path), name)


@pytest.mark.parametrize("address", ["https://example.org/models", ""])
def test_an_address_that_is_no_registry(address: str) -> None:
    with pytest.raises(UserError, match=rf"registry '{address}': must be a path, or an address of s3://"):
        Registry(address, "model")


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / ("long" * 80)), "model")
    with pytest.raises(UserError, match=r"model cannot be listed: File name too long; check the address"):
        registry.history()
    with pytest.raises(storage.UnavailableError, match="File name too long"):
        storage.stat(registry.address)


def test_a_model_may_have_any_name(tmp_path: Path) -> None:
    """The file that probes the store is no model's folder."""
    for name in ("creates-once", "log", "versions"):
        assert appended(Registry(str(tmp_path), name), None).number == 1


def test_a_registry_that_cannot_be_reached(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for registry in (Registry(str(file), "model"), Registry("s3://no-such-bucket-here", "model")):
        with pytest.raises(UserError, match=r"registry '.*': model cannot be written: .*; check the address"):
            appended(registry, None)
    with pytest.raises(UserError, match=r"model cannot be listed: .*; check the address and the rights"):
        Registry("s3://no-such-bucket-here", "model").history()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"model cannot be listed: .*Connection refused"):
        Registry(bucket, "model").history()
