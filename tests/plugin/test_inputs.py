"""Inputs of users' own tasks: what identifies a run, and one download for all ranks of a host."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flytekit.models.literals import Literal, LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytekitplugins.ddp.inputs import identify_inputs, share_downloads


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
        return identify_inputs(inputs, literals, ignored=("note",))

    expected = {"data": {"files": ["s3://bucket/a"], "name": "mine"}, "folder": "s3://bucket/folder", "rate": 0.5}
    assert described("one") == described("two") == expected
    hashed = LiteralMap({"folder": Literal(hash="abc")})
    assert described("one", hashed) == {**expected, "folder": "abc"}


def test_modules_count_by_their_weights() -> None:
    def described(weight: float) -> dict[str, Any]:
        module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(module.weight, weight)
        torch.nn.init.zeros_(module.bias)
        return identify_inputs({"models": [module]}, None, ignored=())

    assert described(1.0) == described(1.0) != described(2.0)


def test_one_rank_of_a_host_downloads_a_file_and_the_others_wait(tmp_path: Path) -> None:
    """Ranks are threads here: each has opened the lock's file itself."""
    path, downloads = tmp_path / "file", []

    def download() -> None:
        downloads.append(path)
        time.sleep(0.3)
        path.write_text("content")

    def open_as_rank(_: int) -> str:
        file = remote("s3://bucket/a", path)
        file._downloader = download
        share_downloads({"data": Data([file], "")})
        return Path(file).read_text()

    with ThreadPoolExecutor(4) as ranks:
        assert [*ranks.map(open_as_rank, range(4))] == ["content"] * 4
    assert downloads == [path]
