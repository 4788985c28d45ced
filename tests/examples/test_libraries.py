"""The recipes of examples/libraries: here those whose packages are installed, by `make libraries` all of them."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import faults
import libraries
import numpy as np
import pytest
import torch
from cli import HELPERS
from training_runs import losses, resumed_steps, train_in, weights

from flyte_ddp import RankError, fetch
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.on_demand_set import OnDemand

DATA = libraries.find_recipes("data")
IN_CI = ("datasets", "h5py", "litdata", "lmdb", "polars", "pyarrow", "safetensors", "webdataset")
HP = Hyperparameters(
    model="libraries:linear", epochs=2, batch_size=8, num_ranks=2, precision="fp64", log_interval=1,
    num_classes=3, validation_fraction=0, learning_rate=1e-5,
)  # fmt: skip


def test_packages_of_the_environment_suffice_for_recipes_of_data() -> None:
    assert {*DATA} >= {f"data_{name}" for name in IN_CI}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.usefixtures("user_models")
@pytest.mark.filterwarnings("default")  # litdata leaves files open
@pytest.mark.parametrize("name", DATA)
def test_data_are_the_same_on_all_ranks_and_after_a_kill(name: str, tmp_path: Path, monkeypatch) -> None:
    """Samples as they were written; results up to rounding on one rank, and bit for bit after a kill in epoch 2."""
    recipe, source = import_module(f"examples.libraries.{name}"), tmp_path / "source"
    source.mkdir()
    written = {part: libraries.draw_samples(part, getattr(recipe, "SHAPE", (8,))) for part in libraries.SAMPLES}
    for part, samples in written.items():
        recipe.write(source, part, *samples)
    hp = replace(HP, dataset=f"{recipe.__name__}:samples", data_source=str(source))

    made = recipe.samples(str(source))
    for part, (inputs, labels) in written.items():
        given = getattr(made, part) if isinstance(made, OnDemand) else None
        if given is None:
            given = list(zip(getattr(made, f"{part}_inputs"), getattr(made, f"{part}_targets"), strict=True))
        assert len(given) == len(labels)
        for number in reversed(range(len(given))):
            item, label = given[number]
            np.testing.assert_array_equal(np.asarray(item).reshape(inputs[number].shape), inputs[number])
            assert int(label) == labels[number]

    data = fetch(hp.dataset, hp.data_source, tmp_path / "data", progress="off")
    one = train_in(tmp_path / "one", replace(hp, num_ranks=1), data, loaders=1)
    two = train_in(tmp_path / "two", hp, data, loaders=1)
    assert losses(two) == pytest.approx(losses(one), abs=1e-9)
    faults.inject(monkeypatch, tmp_path / "marker", rank=1, at="training", kind="SIGKILL", **{"pass": 9})
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        train_in(tmp_path / "killed", hp, data, loaders=1)
    killed = train_in(tmp_path / "killed", hp, data, loaders=1)
    assert 0 < resumed_steps(killed)[-1] <= 9
    found = weights(killed)
    assert all(torch.equal(value, found[key]) for key, value in weights(two).items())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", libraries.find_recipes("model"))
def test_models_are_the_same_on_all_ranks_after_a_kill_and_in_files(name: str, tmp_path: Path) -> None:
    """Equal up to rounding on two ranks, and bit for bit after a kill; exported unless the recipe says it is not."""
    recipe = libraries.FOLDER / f"{name}.py"
    command = [sys.executable, HELPERS / "model_library.py", recipe, tmp_path]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["difference"] < 1e-9
    assert found["same_bits"]
    assert 0 < found["resumed"] <= 5
    assert not [note for note in found["notes"] if "number of ranks" in note]
    assert found["exported"] == ("not exported" not in recipe.read_text()), found["reason"]
