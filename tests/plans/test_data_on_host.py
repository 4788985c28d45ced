"""Prepared data on a host that does not see the launcher's: by content, wherever that comes from."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept_checkpoints import IDENTITY
from PIL import Image

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.machine.resources import Request
from flyte_ddp.core.runs.work import Work
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.training.plan import TrainingJob
from flyte_ddp.datasets import fetch
from flyte_ddp.plans.data_on_host import read_prepared_digest, set_data_folder_on_host
from flyte_ddp.plans.resolve import resolve

MODULE = """
from pathlib import Path
import numpy as np
from flyte_ddp.datasets import image_arrays

def load(source):
    count = int(Path(source, "count").read_text())
    images, labels = np.zeros((count, 4, 4), np.uint8), np.arange(count) % 2
    return image_arrays(images, labels, images, labels, ["a", "b"])
"""
HostHas = Callable[..., Path]


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
def host_has(tmp_path: Path) -> HostHas:
    """Finds the data of a run on a host with a cache; unless given, what the launcher has is fetched, too."""

    def find(source: str, dataset: str = "served_data:load", launcher: Path | None = None) -> Path:
        folder = tmp_path / f"launcher {Path(source or dataset).name}"
        launcher = launcher or fetch(dataset, source, folder, progress="off")
        hp = Hyperparameters(dataset=dataset, data_source=source, num_ranks=1)
        settings = Settings(cache_folder=tmp_path / "cache")
        job = TrainingJob(resolve(hp), data_folder=Path("/nowhere"))
        identity = replace(IDENTITY, data=read_prepared_digest(launcher))
        work = Work("", job, Request(1), tmp_path, identity, settings)
        found = set_data_folder_on_host(work)
        assert found == replace(work, arguments=replace(job, data_folder=found.arguments.data_folder))
        return found.arguments.data_folder

    return find


def test_the_same_content_from_another_source(host_has: HostHas, sources: list[str]) -> None:
    assert host_has(sources[0]) == host_has(sources[1])


@pytest.mark.parametrize("damage", ["train_inputs.npy", "dataset.json"])
def test_what_is_damaged_is_fetched_again(host_has: HostHas, sources: list[str], damage: str) -> None:
    file = host_has(sources[0]) / damage
    whole = file.read_bytes()
    file.write_bytes(whole[:20])
    assert host_has(sources[0]) == file.parent
    assert file.read_bytes() == whole


def test_a_source_that_had_other_content_for_a_while(host_has: HostHas, sources: list[str], tmp_path: Path) -> None:
    """What a host has fetched in that time does not stand in the way later."""
    launcher = fetch("served_data:load", sources[0], tmp_path / "launcher", progress="off")
    (Path(sources[0]) / "count").write_text("6")
    with pytest.raises(UserError, match="fetched on this host differ from the launcher's data"):
        host_has(sources[0], launcher=launcher)
    (Path(sources[0]) / "count").write_text("4")
    assert read_prepared_digest(host_has(sources[0], launcher=launcher)) == read_prepared_digest(launcher)


def test_encoded_images_are_read_where_this_run_has_them(host_has: HostHas, tmp_path: Path) -> None:
    """As what is prepared of them is a list of addresses."""
    for label in ("a", "b"):
        folder = tmp_path / "here" / label
        folder.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    sets = [f"image_folder:{tmp_path / name}" for name in ("here", "there")]
    found = [host_has("", dataset) for dataset in sets]
    assert read_prepared_digest(found[0]) == read_prepared_digest(found[1])
    assert [json.loads((folder / "dataset.json").read_text())["name"] for folder in found] == sets
