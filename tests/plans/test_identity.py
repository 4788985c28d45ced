"""What makes a run another one: its name, which is part of the cache key, and what a checkpoint must belong to."""

import importlib
import sys
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.core.text.json_lines import read_records
from flyte_ddp.core.user_code import digest
from flyte_ddp.plans.identity import checkpoint_identity, run_name
from flyte_ddp.run import run_training

HP = Hyperparameters()


def test_another_release_of_what_computes_is_another_run(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade retrains, and no checkpoint of the release before is taken for its own; extras may be missing."""
    found = {(run_name(HP, "data"), checkpoint_identity(HP, digits).releases)}
    for changed in digest.ARITHMETIC:

        def version(name: str, changed: str = changed) -> str:
            if name == changed and changed in ("torchcodec", "simplejpeg"):
                raise PackageNotFoundError
            return "99.0" if name == changed else metadata.version(name)

        monkeypatch.setattr(digest, "version", version)
        found.add((run_name(HP, "data"), checkpoint_identity(HP, digits).releases))
    assert len({name for name, _ in found}) == len({releases for _, releases in found}) == 9


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which modules that earlier tests have imported are new."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("identity_", "source"))]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_what_the_users_model_imports_decides_the_run(digits: Path, project: Path) -> None:
    hp = Hyperparameters(model="identity_mine:model")
    (project / "identity_mine.py").write_text("def model(**_):\n    from identity_layers import Block\n")
    found = []
    for number in (1, 2):
        (project / "identity_layers.py").write_text(f"Block = {number}\n")
        found.append((run_name(hp, "data"), checkpoint_identity(hp, digits).user_code))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


OWN = """
import torch

def make(num_classes, input_shape):
    return torch.nn.Sequential(torch.nn.Flatten(), Own(64, 10))

class Own(torch.nn.Linear):
    pass
"""
IMPORTS = {
    "seen": "from source.identity_net import make as model\n",
    "in a function": """
def model(num_classes, input_shape):
    import sys
    sys.path.insert(0, 'source')
    return __import__('identity_' + 'net').make(num_classes, input_shape)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", IMPORTS)
def test_what_a_model_uses_and_the_cache_key_does_not_cover_is_named(
    digits: Path, project: Path, capfd: pytest.CaptureFixture, way: str
) -> None:
    """Other modules of the project, such as the script that starts a run, are not."""
    (project / "source").mkdir()
    (project / "source/identity_net.py").write_text(OWN)
    (project / "identity_script.py").touch()
    importlib.import_module("identity_script")
    (project / "identity_hiding.py").write_text(IMPORTS[way])
    hp = Hyperparameters(model="identity_hiding:model", epochs=1, batch_size=500, num_ranks=1)
    result = run_training(hp, digits, project / "run", Settings(progress="lines", wandb_mode="disabled"))
    said = "Your code uses source/identity_net.py, which the cache key does not cover: changes are not detected."
    expected = 0 if way == "seen" else 1
    assert [said in note for note in read_records(result.metrics)[-1]["notes"]] == [True] * expected
    assert "".join(capfd.readouterr()).count(said) == expected
