"""Prepared data on a host that does not see the launcher's: by content, wherever that comes from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch
from flyte_ddp.errors import UserError
from flyte_ddp.launch.remote.host_data import find_or_fetch_data, prepared_digest
from flyte_ddp.settings import Settings

MODULE = """
from pathlib import Path
import numpy as np
from flyte_ddp.datasets import image_arrays

def load(source):
    count = int(Path(source, "count").read_text())
    images, labels = np.zeros((count, 4, 4), np.uint8), np.arange(count) % 2
    return image_arrays(images, labels, images, labels, ["a", "b"])
"""
Ask = Callable[[str], Path]


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two of them with the same content."""
    (tmp_path / "served_data.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    found = [tmp_path / "first", tmp_path / "second"]
    for source in found:
        source.mkdir()
        (source / "count").write_text("4")
    return [str(source) for source in found]


@pytest.fixture
def ask(sources: list[str], tmp_path: Path) -> Ask:
    """Prepared data for a run whose launcher has fetched from this source, as a host with a cache has them."""

    def called(source: str) -> Path:
        launcher = fetch("served_data:load", source, tmp_path / "launcher" / Path(source).name, progress="off")
        return host_has(tmp_path, "served_data:load", source, launcher)

    return called


def host_has(tmp_path: Path, dataset: str, source: str, launcher: Path) -> Path:
    job: Any = SimpleNamespace(
        hp=Hyperparameters(dataset=dataset, data_source=source),
        data=Path("/nowhere"),
        settings=Settings(cache_folder=tmp_path / "cache"),
        identity=SimpleNamespace(data=prepared_digest(launcher)),
    )
    return find_or_fetch_data(job)


def test_the_same_content_from_another_source(ask: Ask, sources: list[str]) -> None:
    assert ask(sources[0]) == ask(sources[1])


@pytest.mark.parametrize("damage", ["train_images.npy", "dataset.json"])
def test_what_is_damaged_is_fetched_again(ask: Ask, sources: list[str], damage: str) -> None:
    folder = ask(sources[0])
    whole = (folder / damage).read_bytes()
    (folder / damage).write_bytes(whole[:20])
    assert (ask(sources[0]) / damage).read_bytes() == whole


def test_a_source_that_had_other_content_for_a_while(ask: Ask, sources: list[str], tmp_path: Path) -> None:
    """What a host has fetched in that time does not stand in the way later."""
    launcher = fetch("served_data:load", sources[0], tmp_path / "launcher" / "first", progress="off")
    (Path(sources[0]) / "count").write_text("6")
    with pytest.raises(UserError, match="what this host has fetched is not what the launcher has"):
        host_has(tmp_path, "served_data:load", sources[0], launcher)
    (Path(sources[0]) / "count").write_text("4")
    assert prepared_digest(host_has(tmp_path, "served_data:load", sources[0], launcher)) == prepared_digest(launcher)


def test_encoded_images_are_read_where_this_run_has_them(tmp_path: Path) -> None:
    """As what is prepared of them is a list of addresses."""
    for label in ("a", "b"):
        folder = tmp_path / "here" / label
        folder.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    sets = [f"image_folder:{tmp_path / name}" for name in ("here", "there")]
    launchers = [fetch(dataset, "", tmp_path / f"launcher-{dataset[-5:]}", progress="off") for dataset in sets]
    assert prepared_digest(launchers[0]) == prepared_digest(launchers[1])
    for dataset, launcher in zip(sets, launchers, strict=True):
        found = host_has(tmp_path, dataset, "", launcher)
        assert json.loads((found / "dataset.json").read_text())["name"] == dataset
