"""Versions are judged, loaded and used for predictions with the code that they were trained with."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from gate import Gate
from training_runs import QUIET, train_in

from flyte_ddp import load_champion
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.loading.user_functions import UserFunction
from flyte_ddp.core.user_code.source import read_user_sources
from flyte_ddp.core.user_code.stored import StoredSpec
from flyte_ddp.models.artifacts import load_model
from flyte_ddp.release.registry import Registry
from flyte_ddp.run import Result

MODEL = """
import math
from pathlib import Path
from torch import nn
import layers_of_nets.activations
from layers_of_nets import activations as same

class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.first, self.last = nn.Linear(math.prod(input_shape), 32), nn.Linear(32, num_classes)
        self.beside = Path(__file__).with_name("beside.txt").read_text()
        assert layers_of_nets.activations is same

    def forward(self, images):
        from layers_of_nets.activations import activate
        return self.last(activate(self.first(images.flatten(1))))

def collate(samples):
    return "{name}"
"""
ACTIVATIONS = "from .functions import {name}\n\ndef activate(values):\n    return {name}(values)\n"


def write_code(folder: Path, name: str) -> None:
    """Write the user's module and package with an activation, as an editor would, and forget the imported ones."""
    (folder / "layers_of_nets").mkdir(exist_ok=True)
    (folder / "beside.txt").write_text("data")
    (folder / "nets.py").write_text(MODEL.replace("{name}", name))
    (folder / "layers_of_nets/functions.py").write_text("from torch import relu, tanh\n")
    (folder / "layers_of_nets/activations.py").write_text(ACTIVATIONS.format(name=name))
    for module in [one for one in sys.modules if one.partition(".")[0] in ("nets", "layers_of_nets")]:
        del sys.modules[module]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # sources of one second and one size are one for Python
    return tmp_path


def train(folder: Path, digits: Path, **values: object) -> Result:
    return train_in(folder, Hyperparameters(model="nets:Net", num_ranks=1, **values), digits, QUIET)


def test_a_champion_has_its_own_code_when_today_has_another(code: Path, digits: Path) -> None:
    registry, runs = Registry(str(code / "registry"), "digits"), dict[str, Result]()
    gate = Gate(runs, registry, digits, code)
    write_code(code, "relu")
    first = runs["first"] = train(code / "first", digits, epochs=4)
    released = gate.release("first").verdict
    assert released.promotes, released.reason
    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = load_model(first.model, first.sidecar)[0](images)
    write_code(code, "tanh")
    second = runs["second"] = train(code / "second", digits, epochs=4, seed=1)
    verdict = gate.release("second").verdict
    assert verdict.champion_score == released.challenger_score == pytest.approx(first.test_accuracy)
    assert verdict.challenger_score == pytest.approx(second.test_accuracy)
    assert not verdict.promotes, verdict.reason
    champion, sidecar = load_champion(registry.address, "digits")
    today, _ = load_model(second.model, second.sidecar)
    assert torch.equal(champion(images), before)
    assert sidecar.model == "nets:Net"
    assert type(today).__module__ == "nets"
    weights = torch.load(first.model, weights_only=True)
    plain = torch.tanh(torch.nn.functional.linear(images.flatten(1), weights["first.weight"], weights["first.bias"]))
    today.load_state_dict(weights)
    expected = torch.nn.functional.linear(plain, weights["last.weight"], weights["last.bias"])
    torch.testing.assert_close(today(images), expected)


def test_a_loader_process_gets_the_code_with_the_name(code: Path) -> None:
    write_code(code, "relu")
    spec = StoredSpec("nets:collate", read_user_sources("nets:collate"))
    write_code(code, "tanh")
    sent = pickle.dumps(UserFunction("collate", spec))
    for finder in [one for one in sys.meta_path if type(one).__name__ == "StoredImporter"]:
        sys.meta_path.remove(finder)  # as in a new process
    assert pickle.loads(sent).load()([]) == "relu"
    assert UserFunction("collate", "nets:collate").load()([]) == "tanh"
