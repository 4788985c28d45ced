"""Packs a run's sources, the library's and the user's own, for hosts that do not have the same."""

from __future__ import annotations

import pickle
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flyte_ddp.code_digest import package_files
from flyte_ddp.errors import UserError
from flyte_ddp.user_source import user_sources

if TYPE_CHECKING:
    from flyte_ddp.config import Hyperparameters

LIBRARY = Path(__file__).parents[2]


def pack_sources(hp: Hyperparameters) -> bytes:
    """Return a compressed pickle of the library's sources, and of the user's sources that the cache key covers.

    Reads all these files. The user's are found by the model and the data sets that the hyperparameters name.
    """
    files = {path.relative_to(LIBRARY.parent).as_posix(): path for path in package_files(LIBRARY)}
    for spec in (hp.model, hp.dataset, hp.test_dataset):
        with suppress(UserError):  # names no user's code, or a missing module, which the rank will report
            files |= {name: path for name, path, _ in user_sources(spec)}
    contents = [(str(path.parents[name.count("/")]), name, path.read_bytes()) for name, path in files.items()]
    return zlib.compress(pickle.dumps(contents), level=1)


@contextmanager
def unpack_sources(sources: bytes, below: str) -> Iterator[tuple[str | None, list[str]]]:
    """Write the sources into a new folder, yield it and the folders for ``sys.path``, and delete the folder at the end.

    Yields None and the original folders on a host that has the same files at the same paths; writes nothing there.

    Args:
        sources: of :func:`pack_sources`; they are unpickled, so they must come from a trusted sender.
        below: folder in which the new folder is made.
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
    """Return whether a file can be read and has this content; reads all of it."""
    try:
        return path.read_bytes() == content
    except OSError:
        return False
