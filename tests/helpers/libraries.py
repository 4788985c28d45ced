"""The recipes of examples/libraries: requirements, and the model and samples for recipes of data libraries."""

import math
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
from cli import ROOT
from faults import Passing
from numpy.typing import NDArray
from torch import nn

FOLDER = ROOT / "examples" / "libraries"
SAMPLES = {"train": 52, "test": 12}


def read_pins(recipe: Path) -> list[str]:
    """Return the requirements ``name==version`` in a recipe's header, which `make libraries` installs."""
    header = recipe.read_text().partition("# ///\n")[0]
    return re.findall(r'"([\w.-]+==[^"]+)"', header)


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def find_recipes(kind: str) -> list[str]:
    """Return the names of the recipes (kind: data, model) whose packages are installed here, in any version."""
    return sorted(
        recipe.stem
        for recipe in FOLDER.glob(f"{kind}_*.py")
        if all(is_installed(pin.partition("==")[0]) for pin in read_pins(recipe))
    )


def draw_samples(part: str, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inputs (whole numbers from 0 to 255, which are exact in each format) and labels 0, 1 and 2."""
    random = np.random.default_rng(list(SAMPLES).index(part))
    inputs = random.integers(256, size=(SAMPLES[part], *shape)).astype(np.float32)
    return inputs, inputs.reshape(len(inputs), -1)[:, 0].astype(np.int64) // 86


def linear(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a layer that passes points of ``faults``."""
    return Passing(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


if __name__ == "__main__":
    print("\n".join(read_pins(Path(sys.argv[1]))))
