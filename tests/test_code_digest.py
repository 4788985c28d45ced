"""Which code a run's identity covers: what training may import, and nothing else."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from cli import ROOT

from flyte_ddp.code_digest import NO_PART_OF_TRAINING, library_digest, package_digest


def test_rooms_above_training_are_left_out_by_the_order_of_rooms() -> None:
    """``make lint`` holds that order: ``run`` imports nothing that stands above it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = contracts[0]["layers"]
    above = " | ".join(layers[: layers.index("run")]).split(" | ")
    assert sorted(above) == sorted(NO_PART_OF_TRAINING)


def test_a_change_of_the_gate_retrains_nothing(tmp_path: Path) -> None:
    library = Path(shutil.copytree(ROOT / "flyte_ddp", tmp_path / "flyte_ddp"))
    before, whole = library_digest(library), package_digest(library)
    assert before == library_digest()
    with (library / "release/checks.py").open("a") as file:
        file.write("\n")
    library_digest.cache_clear()
    package_digest.cache_clear()
    assert library_digest(library) == before
    assert package_digest(library) != whole
    with (library / "training/train.py").open("a") as file:
        file.write("\n")
    library_digest.cache_clear()
    assert library_digest(library) != before
