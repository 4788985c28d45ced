"""Packs a run's sources, the library's and the user's own, for hosts that do not have the same."""

import pickle
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyte_ddp.code_digest import list_package_files
from flyte_ddp.errors import UserError
from flyte_ddp.user_source import find_user_sources

LIBRARY = Path(__file__).parents[2]


def pack_sources(*specs: str) -> bytes:
    """Return a compressed pickle of the library's sources, and of the user's sources that the cache key covers.

    Reads all these files. ``specs`` name the user's own code, such as ``mine:model``.
    """
    files = {path.relative_to(LIBRARY.parent).as_posix(): path for path in list_package_files(LIBRARY)}
    for spec in specs:
        with suppress(UserError):  # malformed, or a missing module, which the rank will report if it needs it
            files |= {name: path for name, path, *_ in find_user_sources(spec)}
    contents = [(str(path.parents[name.count("/")]), name, path.read_bytes()) for name, path in files.items()]
    return zlib.compress(pickle.dumps(contents), level=1)


@contextmanager
def unpack_sources(sources: bytes, parent_folder: str) -> Iterator[tuple[str | None, list[str]]]:
    """Write the sources into a new folder, yield it and the folders for ``sys.path``, and delete the folder at the end.

    Without sources, or if this host has the same files at the same paths, writes nothing, and yields None and the
    original folders. Unpickles ``sources`` of :func:`pack_sources`, so they must come from a trusted sender.
    """
    files: list[tuple[str, str, bytes]] = pickle.loads(zlib.decompress(sources)) if sources else []
    if all(has_content(Path(place, name), content) for place, name, content in files):
        yield None, [*dict.fromkeys(place for place, _, _ in files)]
        return
    with tempfile.TemporaryDirectory(
        prefix="flyte-ddp-sources-", dir=parent_folder, ignore_cleanup_errors=True
    ) as folder:
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
