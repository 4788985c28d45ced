"""The lock files: they pin what pyproject.toml asks for, with hashes, in the same versions for image and tests."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "requirements.lock": ("images", "streams", "elastic", "ray", "dask", "export"),
    "requirements-flyte2.lock": ("images", "streams", "export", "flyte2"),
    "requirements-dev.lock": ("dev",),
}


def required(extras: tuple[str, ...]) -> list[Requirement]:
    """Return what the project needs with these extras, and with the extras of its own that they name."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found = [Requirement(line) for line in lines]
    own = {extra for each in found if each.name == PROJECT["name"] for extra in each.extras}
    return [each for each in found if each.name != PROJECT["name"]] + (required(tuple(sorted(own))) if own else [])


def pins(name: str) -> dict[str, set[str]]:
    """Return the versions that a lock file has of each package: several where they depend on the Python version."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^([\w.-]+)==([\w.+!-]+)", (ROOT / name).read_text(), re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_is_needed_in_versions_that_fit_with_hashes_and_no_host(name: str) -> None:
    pinned = pins(name)
    for needed in required(EXTRAS[name]):
        versions = pinned[re.sub("[-_.]+", "-", needed.name).lower()]
        assert all(needed.specifier.contains(version) for version in versions), needed
    text = (ROOT / name).read_text()
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    assert [block for block in blocks if block.strip() and "--hash=sha256:" not in block] == []
    assert "://" not in text
    assert "index-url" not in text


def test_what_is_tested_is_what_the_image_has() -> None:
    image, image_of_flyte2, development = map(pins, EXTRAS)
    image |= image_of_flyte2
    assert {name for name in image if name in development and image[name] != development[name]} == set()
    assert any(name.startswith("nvidia-nccl") for name in image), "torch without GPUs"
    assert image.keys() <= development.keys()


def test_actions_of_workflows_are_pinned_by_digest() -> None:
    for path in (ROOT / ".github/workflows").iterdir():
        used = re.findall(r"uses: (\S+)", path.read_text())
        assert used
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), path
