"""Packs the sources of the library and of user code for hosts that do not have the same sources."""

import pickle
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.user_code.digest import LIBRARY, list_package_files
from flyte_ddp.core.user_code.source import iterate_user_sources


def pack_sources(*specs: str) -> bytes:
    """Return a compressed pickle of the sources of the library and of the user's ``specs``, such as ``mine:model``.

    Skips a spec that is malformed, or whose module does not exist.
    """
    files = {path.relative_to(LIBRARY.parent).as_posix(): path for path in list_package_files(LIBRARY)}
    for spec in specs:
        with suppress(UserError):  # a malformed spec or a missing module, which the rank reports if necessary
            files |= {name: path for name, path, *_ in iterate_user_sources(spec)}
    contents = [(str(path.parents[name.count("/")]), name, path.read_bytes()) for name, path in files.items()]
    return zlib.compress(pickle.dumps(contents), level=1)


@contextmanager
def unpack_sources(sources: bytes, parent_folder: str) -> Iterator[tuple[str | None, list[str]]]:
    """Write the sources into a temporary folder for the block. Yield the folder, and the folders for ``sys.path``.

    If this host has the same files, or ``sources`` is empty, writes nothing, and yields None and the original folders.
    The temporary folder is made in ``parent_folder``. Unpickles ``sources``, so the sender must be trusted.
    """
    files: list[tuple[str, str, bytes]] = pickle.loads(zlib.decompress(sources)) if sources else []
    paths = [(Path(place, name), content) for place, name, content in files]
    if all(has_content(path, content) for path, content in paths):
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
    with suppress(OSError):  # the file is missing, or in another user's folder
        return path.read_bytes() == content
    return False
