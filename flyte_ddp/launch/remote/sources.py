"""A run's sources, for hosts that have none, or others: this library's and the user's own."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flyte_ddp.errors import UserError
from flyte_ddp.user_source import user_sources

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters

LIBRARY = Path(__file__).parents[2]


def packed(hp: Hyperparameters, folder: Path | None = None) -> bytes:
    """The sources, for :func:`unpacked`: all of a folder, or this library and the user's own code (user_source.py)."""
    files = set(below(folder)) if folder else {*below(LIBRARY), *of_the_user(hp)}
    return zlib.compress(
        pickle.dumps([(str(place), name, (place / name).read_bytes()) for place, name in files]), level=1
    )


def below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Where each file of a folder is found from, and its name there; a package is found from the folder above it."""
    place = folder.parent if (folder / "__init__.py").exists() else folder
    for path in folder.rglob("*"):
        name = path.relative_to(place)
        left_out = name.name.endswith((".pyc", ".tar.gz")) or any(part.startswith(".") for part in name.parts)
        if path.is_file() and not left_out:  # flytekit leaves the archive that it has unpacked in its place
            yield place, str(name)


def of_the_user(hp: Hyperparameters) -> Iterator[tuple[Path, str]]:
    """The same for the files of the user's own code."""
    for spec in (hp.model, hp.dataset, hp.test_dataset):
        with suppress(UserError):  # no code of the user's; or it is missing, which is told where it is looked for
            for name, path, _ in user_sources(spec):
                depth = name.count("/")
                yield path.parents[depth], str(path.relative_to(path.parents[depth]))


@contextmanager
def unpacked(sources: bytes, below: str) -> Iterator[tuple[str | None, list[str]]]:
    """The sources on this host: where they are, if it has the very same; else in a folder of their own for the block.

    Gives that folder, made in ``below``, or None, and the places that Python finds the sources from.
    """
    files: Iterable[tuple[str, str, bytes]] = pickle.loads(zlib.decompress(sources))
    places = {place: None for place, _, _ in files}
    if all(same(Path(place, name), content) for place, name, content in files):
        yield None, [*places]
        return
    folder = tempfile.mkdtemp(prefix="flyte-ddp-sources-", dir=below)
    try:
        for _, name, content in files:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder, [folder]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def same(path: Path, content: bytes) -> bool:
    """Whether a file is there, with this content."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False
