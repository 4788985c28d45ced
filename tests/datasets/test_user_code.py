"""``package.module:callable``: importing it and the digest of its source."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from image_folders import write_files

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import ListedOrder
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.training.optimisation import make_schedule, make_user_optimizers
from flyte_ddp.core.user_code.callables import load_callable
from flyte_ddp.core.user_code.source import compute_user_code_digest, iterate_user_sources
from flyte_ddp.datasets.custom import CustomSet
from flyte_ddp.datasets.prepared import apply_sampling
from flyte_ddp.pods.run_inputs import find_or_fetch_data_set


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package and a module in the working directory, with names that nothing else has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in [name for name in sys.modules if name.startswith("users_")]:
        monkeypatch.delitem(sys.modules, name)
    return write_sources(
        tmp_path,
        {
            "users_package/__init__.py": "",
            "users_package/inner/__init__.py": "",
            "users_package/inner/models.py": "from users_package.helper import two\ndef one():\n    return two() - 1\n",
            "users_package/helper.py": "def two():\n    return 2\n",
            "users_module.py": "number = 3\nclass Three:\n    pass\n",
        },
    )


def write_sources(folder: Path, sources: dict[str, str]) -> Path:
    return write_files(folder, {name: text.encode() for name, text in sources.items()})


def test_a_callable_in_the_working_directory_is_found(project: Path) -> None:
    assert load_callable("users_package.inner.models:one")() == 1
    assert type(load_callable("users_module:Three")()).__name__ == "Three"
    assert load_callable("json:loads") is json.loads
    assert sys.path[0] == str(project)
    assert sys.path.count(str(project)) == 1


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_module:make", "no module named 'no_such_module'; install .*, or start from the directory"),
        ("users_module:make", "has no 'make'"),
        ("users_module:number", "is a int, not callable"),
        ("users_module", "must have the form package.module:callable"),
    ],
)
def test_a_bad_name_is_explained(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_callable(spec)
    assert repr(spec) in caught.value.message
    assert len(caught.value.message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("import not_anywhere\n", UserError, "No module named 'not_anywhere'; install"),
        ("from users_module import gone\n", UserError, "importing users_broken failed: cannot import name 'gone'"),
        ("import os\ndef model(:\n    pass\n", UserError, r".*\(users_broken\.py, line 2\); correct"),
        ("1 / 0\n", ZeroDivisionError, "division by zero"),
    ],
)
def test_a_failing_import_is_explained_and_the_users_own_error_is_not(project: Path, text: str, error, said) -> None:
    (project / "users_broken.py").write_text(text)
    with pytest.raises(error, match=said):
        load_callable("users_broken:make")


def test_an_error_of_the_users_own_begins_with_his_line(project: Path) -> None:
    """Not with calls of this library, nor with the line of a package that he called."""
    code = "import json\n\ndef inner(text):\n    return json.loads(text)\n\ndef outer(text):\n    return inner(text)\n"
    (project / "users_errors.py").write_text(code)
    with pytest.raises(UserError) as raised:
        find_or_fetch_data_set("users_errors:outer", "", "")
    first, empty, *trace = raised.value.message.splitlines()
    assert first.startswith(
        "dataset='users_errors:outer': users_errors.py:4: json.decoder.JSONDecodeError: Expecting value"
    )
    assert not empty
    assert trace[:4] == [
        f'  File "{project}/users_errors.py", line 7, in outer',
        "    return inner(text)",
        f'  File "{project}/users_errors.py", line 4, in inner',
        "    return json.loads(text)",
    ]
    assert isinstance(raised.value.__cause__, json.JSONDecodeError)


def test_a_set_that_is_here_is_used_although_another_mirror_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the folder says what the content is."""
    monkeypatch.setenv("FLYTE_DDP_RUNS", str(tmp_path))
    monkeypatch.setenv("FLYTE_DDP_PROGRESS", "off")
    with pytest.raises(UserError, match="cannot get digits"):
        find_or_fetch_data_set("digits", "/nowhere", "")
    folder = find_or_fetch_data_set("digits", "", "")
    assert find_or_fetch_data_set("digits", "/nowhere", "") == folder


@pytest.mark.parametrize(
    ("spec", "path", "text", "differs"),
    [
        ("users_package.inner.models:one", "users_package/helper.py", "def two():\n    return 9\n", True),
        ("users_package.inner.models:one", "users_package/inner/models.py", "", True),
        ("users_package.inner.models:one", "users_package/inner/__init__.py", "x = 1", True),
        ("users_package.inner.models:one", "users_package/new.py", "", True),
        ("users_package.inner.models:one", "users_package/notes.txt", "x", False),
        ("users_package.inner.models:one", "users_package/.venv/lib.py", "x", False),
        ("users_package.inner.models:one", "users_module.py", "", False),
        ("users_module:Three", "users_module.py", "", True),
        ("users_module:Three", "users_module.py", '"""What."""\nnumber = (3)  # three\nclass Three: "Docs."\n', False),
        ("users_module:Three", "users_package/helper.py", "", False),
    ],
)
def test_the_digest_changes_with_the_meaning_of_the_top_packages_source(project, spec, path, text, differs) -> None:
    before = compute_user_code_digest(spec)
    write_sources(project, {path: text})
    assert (compute_user_code_digest(spec) != before) == differs


@pytest.mark.parametrize("imported_first", [False, True])
def test_a_module_that_changed_after_its_import_is_refused_until_it_is_imported_again(
    project: Path, imported_first: bool
) -> None:
    module = project / "users_module.py"
    if imported_first:
        load_callable("users_module:Three")
    before = compute_user_code_digest("users_module:Three")
    load_callable("users_module:Three")
    module.write_text("# a comment\n" + module.read_text())
    assert compute_user_code_digest("users_module:Three") == before
    module.write_text(module.read_text() + "\ndef more():\n    return 3\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"module users_module has changed .* importlib.reload\(users_module\)"):
            compute_user_code_digest("users_module:Three")
    importlib.invalidate_caches()
    importlib.reload(sys.modules["users_module"])
    assert load_callable("users_module:more")() == 3
    assert compute_user_code_digest("users_module:Three") != before


def test_the_digest_imports_nothing(project: Path) -> None:
    (project / "users_trap").mkdir()  # a package without __init__.py, too
    digests = set()
    for text in ("raise AssertionError('imported')\n", "raise AssertionError\n"):
        (project / "users_trap" / "deep.py").write_text(text)
        digests.add(compute_user_code_digest("users_trap.deep:make"))
    assert len(digests) == 2
    assert not [name for name in sys.modules if name.startswith("users_trap")]
    for spec in ("no_such_module:make", "__main__:make" if sys.modules["__main__"].__spec__ is None else "nope:x"):
        with pytest.raises(UserError, match="no module named"):
            compute_user_code_digest(spec)


USERS_TOP = "users_top:make"


@pytest.mark.parametrize(
    "text",
    [
        "import users_layers",
        "try:\n    import users_layers\nexcept ImportError:\n    users_layers = None",
        "import importlib\nlayers = importlib.import_module(name='users_layers')",
        "import users_between",  # which imports it
        "import users_kit",  # likewise, in a function of a module
        "import no_such_module_anywhere\nimport users_layers",
    ],
)
def test_the_digest_follows_imports_through_the_users_own_code(project: Path, text: str) -> None:
    sources = {
        "users_layers.py": "import users_top\nclass Block: ...\n",  # a cycle
        "users_between.py": "from users_layers import Block\n",
        "users_kit/__init__.py": "",
        "users_kit/deep/__init__.py": "from . import blocks\n",
        "users_kit/deep/blocks.py": "def f():\n    import users_layers\n",
        "users_namespace/part.py": "import users_between\n",
        "users_other.py": "import users_top  # which does not import this\n",
        "users_top.py": text,
    }
    write_sources(project, sources)
    names = {name for name, *_ in iterate_user_sources(USERS_TOP)}
    assert {"users_top.py", "users_layers.py"} <= names
    assert "users_other.py" not in names
    assert not [name for name in sys.modules if name.startswith("users_")]


@pytest.mark.parametrize("where", ["editable", "lib/python3.11/site-packages", "lib/python3/dist-packages"])
def test_installed_packages_do_not_count_but_the_users_own_elsewhere_do(project: Path, monkeypatch, where: str) -> None:
    elsewhere = project / where
    monkeypatch.syspath_prepend(str(elsewhere))
    (project / "users_top.py").write_text("import users_elsewhere, users_single\n")
    for name in ("users_elsewhere/__init__.py", "users_single.py"):
        write_sources(elsewhere, {name: "x = 1\n"})
        before = compute_user_code_digest(USERS_TOP)
        (elsewhere / name).write_text("x = 2\n")
        assert (compute_user_code_digest(USERS_TOP) != before) == (where == "editable")
    named = compute_user_code_digest("users_elsewhere:make")  # what the hyperparameters themselves name does
    (elsewhere / "users_elsewhere/__init__.py").write_text("x = 3\n")
    assert compute_user_code_digest("users_elsewhere:make") != named


def test_neither_pythons_own_nor_torch_nor_this_library_is_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two have digests and releases of their own. But a user's module may have the name of one of Python's."""
    monkeypatch.delitem(sys.modules, "sndhdr", raising=False)
    (project / "sndhdr.py").write_text("x = 1\n")
    text = "import torch, torchvision, flyte_ddp.datasets, numpy, os, sys, json, sndhdr\n"
    (project / "users_top.py").write_text(text)
    assert [name for name, *_ in iterate_user_sources(USERS_TOP)] == ["users_top.py", "sndhdr.py"]


def test_an_own_function_with_other_parameters_is_refused_before_it_is_called(project: Path) -> None:
    write_sources(project, {"users_functions.py": "def bare():\n    pass\ndef three(a, b, c):\n    pass\n"})
    weights = torch.nn.Linear(1, 1)
    for setting, given, refuse in (
        ("dataset", "data_source", lambda spec: CustomSet(spec).load("", project, Progress("off"))),
        ("optimizer", "model, hp", lambda spec: make_user_optimizers(weights, spec, Hyperparameters())),
        ("schedule", "step, total_steps", lambda spec: make_schedule(spec, 0, 10)),
    ):
        for name, said in ("bare", "too many positional arguments"), ("three", "missing a required argument: '"):
            spec = f"users_functions:{name}"
            with pytest.raises(UserError) as caught:
                refuse(spec)
            assert str(caught.value).startswith(f"{setting}='{spec}': {said}")
            assert str(caught.value).endswith(f"must accept ({given})")
    order = ListedOrder(np.arange(10), 0)
    with pytest.raises(UserError, match=r"^sampling='users_functions:bare': .*\(samples, seed, epoch\)$"):
        apply_sampling(None, order, "users_functions:bare")
