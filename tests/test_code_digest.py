"""Which code a run's identity covers: what decides results, by its meaning."""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import ROOT

from flyte_ddp.core.user_code.digest import DECIDING, library_digest, list_python_files, package_digest

LIBRARY = ROOT / "flyte_ddp"
DECIDES_NOTHING = {  # files that are imported by those that decide
    "core/checks/fields config/__init__ config/checks": "values of hyperparameters are in the key themselves",
    "core/checks/arrays core/checks/parsing core/checks/records": "which files and JSON are refused",
    "core/settings": "what does not change a run's result",
    "core/errors core/machine/clock core/progress core/results": "what is told, and how",
    "core/text/formatting core/text/json_lines core/text/sections core/text/credentials": "what is told, and how",
    "core/files core/lookahead core/machine/process core/machine/waiting": "how files and threads are treated",
    "core/user_code/callables core/user_code/digest core/user_code/source": "which code there is",
    "core/user_code/stored core/user_code/version": "which code there is",
    "core/launch/supervise/rank": "how ranks start, meet and end; parallel/ decides what they compute together",
    "core/runs/checkpoint core/runs/checkpoint_writer": "how a state gets to a file and back",
    "core/runs/metrics core/runs/run_folder core/runs/work": "what ranks are told, and where the files of a run are",
    "storage/addresses storage/identity": "where bytes come from, and what is known of them",
    "shards/cache shards/locks shards/parallel": "where the bytes of shards come from",
    "shards/packing shards/scanning": "make and check shards, which the fingerprint of the data covers",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy") / "flyte_ddp"
    return Path(shutil.copytree(LIBRARY, folder, ignore=shutil.ignore_patterns("__pycache__")))


def digest_after(
    change: Callable[[str], str], library: Path, name: str, digest: Callable[[Path], str] = library_digest.__wrapped__
) -> str:
    """Return a digest of the copied library with one file changed; restore the file."""
    path = library / name
    text = path.read_text()
    assert change(text) != text
    try:
        path.write_text(change(text))
        return digest(library)
    finally:
        path.write_text(text)


def add_statement(text: str) -> str:
    return f"{text}WORD = 1\n"


def test_what_decides_no_result_retrains_nothing(library: Path) -> None:
    for name, change in (
        ("core/variables.toml", lambda text: text.replace('"60"', '"61"')),  # the default of a variable
        ("release/checks.py", add_statement),
    ):
        assert digest_after(change, library, name) == library_digest()
        assert digest_after(change, library, name, package_digest.__wrapped__) != package_digest()


def test_a_line_of_what_decides_results_retrains(library: Path) -> None:
    for name in DECIDING:
        if not name.endswith(".json"):
            changed = list_python_files(library / name)[-1].relative_to(library).as_posix()
            assert digest_after(add_statement, library, changed) != library_digest()


def test_what_results_depend_on_is_covered() -> None:
    """Each file that is imported by those that decide."""
    deciding = {path for name in DECIDING for path in list_python_files(LIBRARY / name)}
    imported = set()
    for node in [node for path in deciding for node in ast.walk(ast.parse(path.read_bytes()))]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flyte_ddp"):
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            imported |= {LIBRARY.parent / f"{module.replace('.', '/')}.py" for module in modules}
    nothing = {LIBRARY / f"{name}.py" for names in DECIDES_NOTHING for name in names.split()}
    assert {path for path in imported if path.exists()} - deciding <= nothing
