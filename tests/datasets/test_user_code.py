"""``package.module:callable``: importing it and the digest of its source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyte_ddp.errors import UserError
from flyte_ddp.user_code import SPEC, load_callable, split, user_source_digest


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package and a module in the working directory, with names that nothing else has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in [name for name in sys.modules if name.startswith("users_")]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "users_package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text("from users_package.helper import two\ndef one():\n    return two() - 1\n")
    (package.parent / "helper.py").write_text("def two():\n    return 2\n")
    (tmp_path / "users_module.py").write_text("number = 3\nclass Three:\n    pass\n")
    return tmp_path


@pytest.mark.usefixtures("project")
def test_a_callable_in_the_working_directory_is_found() -> None:
    assert load_callable("users_package.inner.models:one")() == 1
    assert type(load_callable("users_module:Three")()).__name__ == "Three"


def test_the_working_directory_comes_once_and_first(project: Path) -> None:
    load_callable("users_module:Three")
    load_callable("users_module:Three")
    assert sys.path[0] == str(project)
    assert sys.path.count(str(project)) == 1


def test_an_installed_callable_is_found() -> None:
    import json

    assert load_callable("json:loads") is json.loads


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no_such_module:make", "no module named 'no_such_module'; install it, or start from the directory"),
        ("users_package.nothing:make", "no module named 'users_package.nothing'"),
        ("users_module.deeper:make", "no module named 'users_module.deeper'"),
        ("users_module:make", "has no 'make'"),
        ("users_module:number", "is a int, not callable"),
        ("users_module", "must have the form package.module:callable"),
        (":make", "must have the form"),
        ("users_module:", "must have the form"),
        ("users_module:a:b", "must have the form"),
        ("users/module.py:make", "must have the form"),
        ("..users_module:make", "must have the form"),
        ("users_module:make\n", "must have the form"),
        ("3d:make", "must have the form"),
    ],
)
def test_a_bad_name_is_explained(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_callable(spec)
    assert repr(spec) in caught.value.message
    assert len(caught.value.message.splitlines()) == 1


def test_what_the_users_module_needs_is_named(project: Path) -> None:
    (project / "users_needy.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(UserError, match="importing users_needy failed: No module named 'not_installed_anywhere'"):
        load_callable("users_needy:make")
    (project / "users_stale.py").write_text("from users_module import gone\n")
    with pytest.raises(UserError, match="importing users_stale failed: cannot import name 'gone'"):
        load_callable("users_stale:make")


def test_the_users_own_error_comes_through(project: Path) -> None:
    (project / "users_broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_callable("users_broken:make")


def changed(path: str, text: str) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)

    return change


@pytest.mark.parametrize(
    ("spec", "change", "differs"),
    [
        ("users_package.inner.models:one", changed("users_package/helper.py", "def two():\n    return 9\n"), True),
        ("users_package.inner.models:one", changed("users_package/inner/models.py", ""), True),
        ("users_package.inner.models:one", changed("users_package/new.py", ""), True),
        ("users_package.inner.models:one", changed("users_package/notes.txt", "x"), False),
        ("users_package.inner.models:one", changed("users_package/.venv/lib.py", "x"), False),
        ("users_package.inner.models:one", changed("users_module.py", ""), False),
        ("users_module:Three", changed("users_module.py", ""), True),
        ("users_module:Three", changed("users_package/helper.py", ""), False),
    ],
)
def test_the_digest_changes_with_the_top_level_packages_source(
    project: Path,
    spec: str,
    change: Callable[[Path], None],
    differs: bool,
) -> None:
    before = user_source_digest(spec)
    change(project)
    assert (user_source_digest(spec) != before) == differs


def test_the_digest_does_not_depend_on_the_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    before = user_source_digest("users_package.inner.models:one")
    moved = project / "moved"
    moved.mkdir()
    shutil.move(project / "users_package", moved / "users_package")
    monkeypatch.chdir(moved)
    assert user_source_digest("users_package.inner.models:one") == before


def test_the_digest_imports_nothing(project: Path) -> None:
    (project / "users_trap").mkdir()  # a package without __init__.py, too
    (project / "users_trap" / "deep.py").write_text("raise AssertionError('imported')\n")
    before = user_source_digest("users_trap.deep:make")
    (project / "users_trap" / "deep.py").write_text("raise AssertionError\n")
    assert user_source_digest("users_trap.deep:make") != before
    assert not [name for name in sys.modules if name.startswith("users_trap")]


@pytest.mark.usefixtures("project")
def test_a_missing_package_has_no_digest() -> None:
    for spec in ("no_such_module:make", "__main__:make" if sys.modules["__main__"].__spec__ is None else "nope:x"):
        with pytest.raises(UserError, match="no module named"):
            user_source_digest(spec)


@given(st.text(st.sampled_from("ab_.:1é/ \n"), max_size=12))
def test_what_is_accepted_can_be_put_together_again(spec: str) -> None:
    """And is two names that Python itself could import."""
    if SPEC.fullmatch(spec) is None:
        with pytest.raises(UserError):
            split(spec)
        return
    module, attribute = split(spec)
    assert f"{module}:{attribute}" == spec
    assert all(part.isidentifier() for part in [*module.split("."), attribute])
