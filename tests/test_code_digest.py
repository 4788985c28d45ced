"""Which code a run's identity covers: what decides results, by its meaning."""

import ast
import shutil
from pathlib import Path

import pytest
from cli import ROOT

from flyte_ddp.code_digest import DECIDING, library_digest, package_digest, python_files

LIBRARY = ROOT / "flyte_ddp"
FIRST = "from __future__ import annotations\n"
DECIDES_NOTHING = {  # files at the root and of shards/ that are imported by those that decide
    "checked_fields config": "values of hyperparameters are in the key themselves",
    "settings": "what does not change a run's result",
    "clock errors formatting json_lines progress results": "what is told, and how",
    "credentials files locks lookahead process": "how files, processes and threads are treated, not what they give",
    "code_digest user_code user_source": "which code there is",
    "shards/cache shards/locks shards/parallel shards/verification": "where the bytes of shards come from",
    "shards/epoch_plan shards/first_sample": "what is planned or refused before a run",
    "shards/packing": "makes shards, which the fingerprint of the data covers",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy") / "flyte_ddp"
    return Path(shutil.copytree(LIBRARY, folder, ignore=shutil.ignore_patterns("__pycache__")))


def digests_with(library: Path, name: str, old: str, new: str) -> tuple[str, str]:
    """Both digests of the copied library with one text replaced by another; in the end it is as before."""
    path = library / name
    text = path.read_text()
    assert old in text
    try:
        path.write_text(text.replace(old, new, 1))
        return library_digest.__wrapped__(library), package_digest.__wrapped__(library)
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param("training/train.py", FIRST, f"{FIRST}# a word\n", id="comment"),
        pytest.param("training/train.py", '"""', '"""A word. ', id="docstring"),
        pytest.param("order/sampling.py", ") -> ", "\n) -> ", id="formatting"),
        *[
            (name, FIRST, f"{FIRST}WORD = 1\n")
            for name in (
                "launch/ray.py",
                "report/report.py",
                "tracking/wandb_run.py",
                "progress.py",
                "release/checks.py",
            )
        ],
    ],
)
def test_what_decides_no_result_retrains_nothing(library: Path, name: str, old: str, new: str) -> None:
    deciding, whole = digests_with(library, name, old, new)
    assert deciding == library_digest()
    assert whole != package_digest()


@pytest.mark.parametrize("name", DECIDING)
def test_a_line_of_what_decides_results_retrains(library: Path, name: str) -> None:
    changed = python_files(library / name)[-1].relative_to(library).as_posix()
    assert digests_with(library, changed, FIRST, f"{FIRST}WORD = 1\n")[0] != library_digest()


def test_what_results_depend_on_is_covered() -> None:
    """Of the files at the root and of shards/ each one that is imported by those that decide."""
    deciding = {path for name in DECIDING for path in python_files(LIBRARY / name)}
    imported = set()
    for node in [node for path in deciding for node in ast.walk(ast.parse(path.read_bytes()))]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flyte_ddp"):
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            imported |= {LIBRARY.parent / f"{module.replace('.', '/')}.py" for module in modules}
    looked_at = {path for path in imported if path.exists() and path.parent in (LIBRARY, LIBRARY / "shards")}
    nothing = {LIBRARY / f"{name}.py" for names in DECIDES_NOTHING for name in names.split()}
    assert looked_at - deciding <= nothing
