"""Each hyperparameter that may name a user's own code: the code makes a run another one, and goes to other hosts."""

import dataclasses
import pickle
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from encoded_runs import labelled
from training_runs import QUIET

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.launch.remote.sources import pack_sources
from flyte_ddp.core.runs.work import Work
from flyte_ddp.datasets import fetch, fingerprint
from flyte_ddp.plans.identity import run_name
from flyte_ddp.run import run_training

OWN = [field.name for field in dataclasses.fields(Hyperparameters) if field.metadata["own"]]
TEXT = """
import numpy as np
from flyte_ddp import image_arrays

def make(source):
    images = np.full((8, 8, 8), {number}, np.uint8)
    return image_arrays(images, [0, 1] * 4, images, [0, 1] * 4, ["a", "b"])
"""
ROWS = """
import numpy as np
from flyte_ddp import arrays

def make(source):
    side = np.full((8, 3), {number} / 2), [0, 1] * 4
    return arrays(side, side)
"""
BESIDE: dict[str, dict[str, Any]] = {  # what must be set beside a field
    "sample": {"dataset": "image_folder:photos"},
    "collate": {"dataset": "own_collate:make", "model": "own_collate:make"},
}


class NotLaunched(Exception):
    """Raised in place of starting ranks."""


@pytest.mark.parametrize("field", OWN)
def test_a_change_of_own_code_is_another_run_and_is_sent(field: str, digits: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"own_{field}"
    labelled(tmp_path / "photos", 6)
    hp = Hyperparameters(**{"num_ranks": 1, field: f"{module}:make", **BESIDE.get(field, {})})
    assert hp.list_user_callables() == (f"{module}:make",)
    found: list[tuple[str, object, bytes]] = []

    def launch(work: Work) -> None:
        sent = {name: content for _, name, content in pickle.loads(zlib.decompress(pack_sources(*work.user_code)))}
        name = run_name(hp, fingerprint(hp.dataset, hp.data_source, hp.test_dataset))
        found.append((name, work.identity, sent[f"{module}.py"]))
        raise NotLaunched

    for number in (1, 22):
        monkeypatch.delitem(sys.modules, module, raising=False)
        Path(f"{module}.py").write_text((ROWS if field == "collate" else TEXT).format(number=number))
        data = (
            fetch(hp.dataset, "", tmp_path / f"data-{number}", progress="off")
            if hp.dataset == f"{module}:make"
            else digits
        )
        with pytest.raises(NotLaunched):
            run_training(hp, data, tmp_path / f"run-{number}", QUIET, launch=launch)
    for before, after in zip(*found, strict=True):
        assert before != after


def test_a_missing_module_is_named_before_anything_starts(digits: Path, tmp_path: Path) -> None:
    for field in OWN:
        if field not in ("dataset", "collate"):  # digits are images, which have no collate
            hp = Hyperparameters(**{field: "not_there.at_all:make", **BESIDE.get(field, {})})
            with pytest.raises(UserError, match="no module named 'not_there'"):
                run_training(hp, digits, tmp_path / "run", QUIET)
