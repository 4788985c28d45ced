"""The saved model and its sidecar."""

import errno
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flytekit.types.file import PythonPickledFile
from predictions import predict_rows
from sidecars import make_sidecar
from torch import nn
from torch.nn import functional
from torchvision.models import mnasnet0_5
from training_runs import QUIET
from traps import MakesFolder

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.models.sidecar import Digests, Sidecar
from flyte_ddp.models import artifacts, zoo
from flyte_ddp.models.stored_code import use_stored_code_if_changed
from flyte_ddp.objectives import make_objective_of_saved_model
from flyte_ddp.objectives.language import Language
from flyte_ddp.run import run_training

GREY = InputSpec(channels=1, height=28, width=28, mean=(0.25,), std=(0.5,))
CLASSES = [f"class {k}" for k in range(10)]


def sidecar() -> Sidecar:
    return make_sidecar(GREY, "tutorial", classes=CLASSES, digests=Digests(data="d" * 64, weights=""))


def trained(name: str = "tutorial", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.build_model(name, 10, GREY)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    return saving.save_model(tmp_path / "run", trained().state_dict(), sidecar())


class TutorialNetwork(nn.Module):
    """Flyte's MNIST tutorial's network, written down by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, 1)
        self.conv2 = nn.Conv2d(20, 50, 5, 1)
        self.fc1 = nn.Linear(4 * 4 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2, 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2, 2)
        return self.fc2(functional.relu(self.fc1(x.view(-1, 4 * 4 * 50))))  # type: ignore[no-any-return]


def test_three_lines_of_plain_pytorch_load_the_model(tmp_path: Path) -> None:
    original = trained()
    path, _ = saving.save_model(tmp_path, original.state_dict(), sidecar())
    model = TutorialNetwork()
    model.load_state_dict(torch.load(path, weights_only=True, mmap=True))  # it can be mapped into memory
    model.eval()
    images = torch.randn(5, 1, 28, 28)
    assert torch.equal(model(images), original(images))


def test_equal_weights_are_equal_files_wherever_they_are_in_memory(tmp_path: Path) -> None:
    state = {"b.weight": torch.randn(4, 3, 5, 5), "a": torch.randn(7), "a.half": torch.ones(2).half()}
    other = {"".join([*name]): value.clone() for name, value in [*state.items()][::-1]}
    other["b.weight"] = other["b.weight"].to(memory_format=torch.channels_last)
    one = saving.save_model(tmp_path / "one", state, sidecar())
    again = saving.save_model(tmp_path / "again", {name: other[name] for name in state}, sidecar())
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in again]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.canary
def test_a_run_of_a_model_whose_modules_have_versions(digits: Path, tmp_path: Path) -> None:
    """torchvision's MNASNet, which takes no weights without: what is trained is loaded by torch alone and predicted."""
    hp = Hyperparameters(model="mnasnet0_5", image_size=32, max_steps=1, num_ranks=1)
    result = run_training(hp, digits, tmp_path / "run", QUIET)
    mnasnet0_5(num_classes=10).load_state_dict(torch.load(result.model, weights_only=True))
    rows = predict_rows(result.model, result.sidecar, tmp_path / "table.csv", dataset=digits)
    right = [row["prediction"] == row["truth"] for row in rows]
    assert sum(right) / len(right) == pytest.approx(result.test_accuracy)


def test_flyte_takes_the_file_for_a_pickle(saved: tuple[Path, Path]) -> None:
    """By its contents, where python-magic is installed; what flytekit refuses is still refused."""
    pytest.importorskip("magic", exc_type=ImportError)
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine

    from tasks.training import TrainingOutputs

    kind = TrainingOutputs.__annotations__["model_state"]
    assert kind is PythonPickledFile
    context, expected = FlyteContextManager.current_context(), TypeEngine.to_literal_type(kind)
    assert expected.blob.format == "python_pickle"
    bare, words = saved[0].with_name("bare.pkl"), saved[0].with_name("words.txt")
    bare.write_bytes(pickle.dumps({"a": 1}))
    words.write_text("no pickle at all")
    for path in (saved[0], bare):
        literal = TypeEngine.to_literal(context, kind(str(path), remote_path=False), kind, expected)
        assert literal.scalar.blob.metadata.type.format == "python_pickle"
    with pytest.raises(ValueError, match="Incorrect file type"):
        TypeEngine.to_literal(context, kind(str(words), remote_path=False), kind, expected)


def test_the_sidecar_keeps_what_it_was_given_and_adds_format_and_digest(saved: tuple[Path, Path]) -> None:
    written = json.loads(saved[1].read_text(encoding="utf-8"))
    digest = hashlib.sha256(saved[0].read_bytes()).hexdigest()
    expected = {"format": "flyte-ddp-model/1", "model": "tutorial", "classes": CLASSES}
    assert {name: written[name] for name in expected} == expected
    assert written["digests"] == {"data": "d" * 64, "weights": digest}
    assert {name: written["input"][name] for name in asdict(GREY)} == {
        **asdict(GREY),
        "mean": [0.25],
        "std": [0.5],
        "crop_share": None,
    }
    assert sorted(path.name for path in saved[0].parent.iterdir()) == ["model.json", "model.pt"]


def test_a_full_disk_leaves_the_pair_of_before(saved: tuple[Path, Path], monkeypatch) -> None:
    before = [path.read_bytes() for path in saved]
    calls = iter(range(1, 10))

    def full(_: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        saving.save_model(saved[0].parent, trained(seed=1).state_dict(), sidecar())
    assert [path.read_bytes() for path in saved] == before
    assert len(list(saved[0].parent.iterdir())) == 2


def flip_a_bit(model: Path, _: Path) -> None:
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)


def edit(**changes: object) -> Callable[[Path, Path], None]:
    def change(_: Path, path: Path) -> None:
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


DAMAGES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "bit": (flip_a_bit, r"model.pt is damaged or not the model of .*SHA-256"),
    "no model": (lambda model, _: model.unlink(), r"cannot read model .*model.pt: No such file"),
    "no sidecar": (lambda _, path: path.unlink(), r"cannot read sidecar .*model.json: No such file"),
    "format": (edit(format="flyte-ddp-model/9"), "has format 'flyte-ddp-model/9'"),
    "no class": (edit(classes=None), "sidecar .*model.json is damaged, so give .*: classes is missing"),
    "equal classes": (edit(classes=["a"] * 10), "sidecar .*model.json: duplicate class names; give the model.json"),
    "a class's type": (edit(classes=[1] * 10), r"model.json is damaged, so .*: classes\[0\]=1: must be text"),
    "no input": (edit(input={}), "model.json is damaged, so .*: input.channels is missing"),
    "a side": (
        edit(input={**asdict(GREY), "height": "28"}),
        "input.height='28': must be a whole number from 1",
    ),
    "one mean": (
        edit(input={**asdict(GREY), "channels": 3}),
        "input must have a mean and a std above 0 for each",
    ),
    "large": (edit(input={**asdict(GREY), "height": 60_000, "width": 60_000}), "too small for .* weights"),
    "no image": (edit(input={**asdict(GREY), "height": 1, "width": 1}), "does not fit|cannot be built for this input"),
    "digests": (edit(digests={"weights": 1}), "digests.weights=1: must be text"),
    "other classes": (edit(classes=["only one"]), r"model.pt does not fit model 'tutorial': .*size mismatch for fc2"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_refused_in_two_lines(saved: tuple[Path, Path], name: str) -> None:
    damage, message = DAMAGES[name]
    damage(*saved)
    with pytest.raises(UserError, match=message) as error:
        artifacts.load_model(*saved)
    assert "\n" not in error.value.message


def test_a_pickle_that_runs_code_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    saved[0].write_bytes(pickle.dumps(MakesFolder(tmp_path / "sprung"), protocol=2))
    edit(digests={"weights": hashlib.sha256(saved[0].read_bytes()).hexdigest()})(*saved)
    with pytest.raises(UserError, match=r"model.pt does not fit model"):
        artifacts.load_model(*saved)
    assert not (tmp_path / "sprung").exists()


def test_tokens_are_decoded_by_the_code_of_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "def decode(tokens):\n    return 'then'\n"
    (tmp_path / "own_words.py").write_text(code.replace("then", "now"))
    options = {"objective": {"decode": "own_words:decode"}}
    of_texts = replace(sidecar(), objective="language", options=options, sources={"own_words.py": code})
    objective = make_objective_of_saved_model(use_stored_code_if_changed(of_texts))
    assert isinstance(objective, Language)
    assert objective.format_tokens([1]) == "then"
