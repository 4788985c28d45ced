"""Inputs of users' own tasks: what identifies a run, and one download for all ranks of a host."""

import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from flytekit.models.literals import Literal, LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins.ddp.inputs import describe_inputs, share_downloads

RANKS = 4


@dataclass
class Data:
    files: list[FlyteFile]
    name: str


def remote(uri: str, path: Path) -> FlyteFile:
    """A file as flytekit hands it to a task: not downloaded yet."""
    file = FlyteFile(str(path))
    file._remote_source = uri
    return file


def test_files_count_by_address_or_hash_and_ignored_inputs_not(tmp_path: Path) -> None:

    def described(place: str, literals: LiteralMap | None = None) -> dict[str, Any]:
        here = tmp_path / place
        folder = FlyteDirectory(str(here))
        folder._remote_source = "s3://bucket/folder"
        inputs = {
            "data": Data([remote("s3://bucket/a", here / "a")], "mine"),
            "folder": folder,
            "rate": 0.5,
            "note": place,
        }
        return describe_inputs(inputs, literals, ignored=("note",))

    expected = {"data": {"files": ["s3://bucket/a"], "name": "mine"}, "folder": "s3://bucket/folder", "rate": 0.5}
    assert described("one") == described("two") == expected
    hashed = LiteralMap({"folder": Literal(hash="abc")})
    assert described("one", hashed) == {**expected, "folder": "abc"}


def test_modules_count_by_their_weights() -> None:
    def described(weight: float) -> dict[str, Any]:
        module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(module.weight, weight)
        torch.nn.init.zeros_(module.bias)
        return describe_inputs({"models": [module]}, None, ignored=())

    assert described(1.0) == described(1.0) != described(2.0)


def count_processes_with_open(path: Path) -> int:
    """How many processes have opened a file."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == path:
                found.add(link.parts[2])
    return len(found)


def open_as_rank(path: Path, log: Path) -> None:
    def download() -> None:
        with log.open("a") as file:
            file.write("downloaded\n")
        deadline = time.monotonic() + 20
        while count_processes_with_open(path.with_name(".file.lock")) < RANKS:  # the others do not wait yet
            assert time.monotonic() < deadline
        path.write_text("content")

    file = remote("s3://bucket/a", path)
    file._downloader = download
    share_downloads({"data": Data([file], "")})
    assert Path(file).read_text() == "content"


def test_one_rank_of_a_host_downloads_a_file_and_the_others_wait(tmp_path: Path) -> None:
    context = get_context("spawn")
    path, log = tmp_path / "file", tmp_path / "log"
    ranks = [context.Process(target=open_as_rank, args=(path, log)) for _ in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    assert log.read_text().split() == ["downloaded"]
