"""A run's sources, for hosts that have none, or others: this library's and the user's own."""

from __future__ import annotations

import pickle
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flyte_ddp.code_digest import python_files
from flyte_ddp.errors import UserError
from flyte_ddp.user_source import user_sources

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters

LIBRARY = Path(__file__).parents[2]


def packed(hp: Hyperparameters) -> bytes:
    """Return the sources, for :func:`unpacked`: this library's, and the user's that the cache key covers.

    Args:
        hp: whose model and data sets may name modules of the user's.
    """
    files = {path.relative_to(LIBRARY.parent).as_posix(): path for path in python_files(LIBRARY)}
    for spec in (hp.model, hp.dataset, hp.test_dataset):
        with suppress(UserError):  # no code of the user's; or it is missing, which is told where it is looked for
            files |= {name: path for name, path, _ in user_sources(spec)}
    contents = [(str(path.parents[name.count("/")]), name, path.read_bytes()) for name, path in files.items()]
    return zlib.compress(pickle.dumps(contents), level=1)


@contextmanager
def unpacked(sources: bytes, below: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield a folder with the sources, and the places that Python finds them from.

    The folder is made in ``below`` and removed at the end of the block. It is None on a host that has the very same
    files in the same places, which are then used.
    """
    files: list[tuple[str, str, bytes]] = pickle.loads(zlib.decompress(sources))
    if all(has_content(Path(place, name), content) for place, name, content in files):
        yield None, [*dict.fromkeys(place for place, _, _ in files)]
        return
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-sources-", dir=below, ignore_cleanup_errors=True) as folder:
        for _, name, content in files:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder, [folder]


def has_content(path: Path, content: bytes) -> bool:
    """Return whether a file can be read and has this content."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False
