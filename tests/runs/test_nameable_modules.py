"""Which modules hyperparameters may name: any locally, in pods those of the project and those that it lists."""

import functools
import sys
from pathlib import Path

import pytest

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.core.user_code.stored import StoredSpec
from flyte_ddp.pods.run_inputs import check_and_identify_run

FOREIGN = {
    "Python's own": "subprocess:getoutput",
    "built in": "posix:system",
    "frozen": "os:system",
    "this library": "flyte_ddp.storage:delete_files",
    "installed": "torchvision.models:resnet18",
    "imported by the project": "mine_own:getoutput",
    "a class imported by the project": "mine_own:CompletedProcess",
    "built in, and imported by the project": "mine_own:system",
}
MINE = """
from functools import partial
from os import system
from subprocess import CompletedProcess, getoutput

def build(num_classes):
    return getoutput

class Instance:
    def __call__(self):
        return 5

filled, instance = partial(getoutput, "true"), Instance()
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_own.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path / "runs"))
    monkeypatch.delitem(sys.modules, "mine_own", raising=False)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_not_the_projects_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FOREIGN[kind]
    assert load_callable(spec), "without the variable all modules may be named"
    monkeypatch.setenv("FLYTE_DDP_MODULES", ".")
    with pytest.raises(UserError, match=rf"^'{spec}': module [\w.]+ is not allowed: .*FLYTE_DDP_MODULES='\.'"):
        load_callable(spec)


def test_what_the_project_defines_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_MODULES", ".")
    assert isinstance(load_callable("mine_own:filled"), functools.partial)
    assert load_callable("mine_own:instance")() == 5
    assert load_callable("mine_own:build").__module__ == "mine_own"
    stored = StoredSpec("away:build", {"away.py": "from os import system as build"})
    assert load_callable(stored), "a model holds its code, and whoever may write models is trusted"
    with pytest.raises(UserError, match="no module named 'no_such_module'"):
        load_callable("no_such_module:build")


def test_what_is_listed_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_MODULES", " torchvision.models,mine_own ")
    assert load_callable("torchvision.models:resnet18")
    with pytest.raises(UserError, match=r"module torchvision\.io is not allowed"):
        load_callable("torchvision.io:read_image")
    monkeypatch.setenv("FLYTE_DDP_MODULES", "torch")
    with pytest.raises(UserError, match=r"module torchvision\.models is not allowed"):
        load_callable("torchvision.models:resnet18")


@pytest.mark.parametrize(
    ("listed", "said"),
    [("subprocess", "'subprocess' is in Python's"), ("os.path", "standard"), ("my-package", "not a module name")],
)
def test_lists_that_cannot_be(listed: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_MODULES", f"torch,{listed}")
    with pytest.raises(UserError, match=rf"^FLYTE_DDP_MODULES='torch,{listed}': .*{said}"):
        load_callable("mine_own:build")


@pytest.mark.parametrize("field", ["dataset", "model", "optimizer", "schedule", "objective"])
def test_check_inputs_refuses_it_before_anything_is_imported(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYTE_DDP_MODULES", ".")
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(UserError, match="module this is not allowed"):
        check_and_identify_run(Hyperparameters(**{field: "this:build"}), "", None)
    assert "this" not in sys.modules
