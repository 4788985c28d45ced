"""A run's sources, for hosts that have none, or others: this library's and the user's own."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
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
# Names of files and folders that hold secrets, unless they are Python's modules.
SECRET = re.compile(
    r"(^|[._-])(secrets?|credentials?|passwords?|token|kubeconfig)([._-]|$)"
    r"|\.(pem|key|p12|pfx|env)$|^id_(rsa|dsa|ecdsa|ed25519)",
    re.IGNORECASE,
)
MOST_NAMED = 5  # of the files that have such names, in a line of the log


def packed(hp: Hyperparameters, folder: Path | None = None) -> bytes:
    """Return the sources, for :func:`unpacked`: of a folder, or this library and the user's own code (user_source.py).

    Prints on stderr how many files of the folder are sent, and names the first of those that have a name for secrets.

    Args:
        hp: whose model and data sets may name modules of the user's.
        folder: all of it is sent, but for hidden files and those that have a name for secrets; None sends no folder.
    """
    files = set(below(folder)) if folder else {*below(LIBRARY), *of_the_user(hp)}
    kept = {name for _, name in files if holds_secrets(Path(name))}
    contents = [(str(place), name, (place / name).read_bytes()) for place, name in files if name not in kept]
    if folder:
        total = sum(len(content) for _, _, content in contents)
        first = ", ".join(sorted(kept)[:MOST_NAMED])
        left_out = f"; left out, as their names are those of secrets: {first}" if kept else ""
        more = f" and {len(kept) - MOST_NAMED:,} more" if len(kept) > MOST_NAMED else ""
        sent = f"{len(contents):,} files of {folder} ({total:,} bytes) are sent to the workers"
        print(f"{sent}{left_out}{more}", file=sys.stderr)
    return zlib.compress(pickle.dumps(contents), level=1)


def holds_secrets(name: Path) -> bool:
    """Return whether a file, or a folder that it is in, has a name for secrets."""
    return name.suffix != ".py" and any(SECRET.search(part) for part in name.parts)


def below(folder: Path) -> Iterator[tuple[Path, str]]:
    """Where each file of a folder is found from, and its name there; a package is found from the folder above it.

    Leaves out hidden files, compiled modules, and the archive that flytekit has unpacked and leaves in its place.
    """
    place = folder.parent if (folder / "__init__.py").exists() else folder
    for path in folder.rglob("*"):
        name = path.relative_to(place)
        left_out = name.name.endswith((".pyc", ".tar.gz")) or any(part.startswith(".") for part in name.parts)
        if path.is_file() and not left_out:
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
