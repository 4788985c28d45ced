"""Tar files for tests, written by Python's tarfile."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.shards.scanning import create_index

BLOCK = 512


def tar_bytes(
    files: Iterable[tuple[str | tarfile.TarInfo, bytes]], form: int = tarfile.USTAR_FORMAT, **options: str
) -> bytes:
    """Return a tar file with these files, each given as name or header and content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as archive:  # type: ignore[call-overload]
        for named, content in files:
            header = tarfile.TarInfo(named) if isinstance(named, str) else named
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


def header_of(name: str, kind: bytes, **fields: object) -> tarfile.TarInfo:
    """Return a header of another kind than a plain file's."""
    header = tarfile.TarInfo(name)
    header.type = kind
    for field, value in fields.items():
        setattr(header, field, value)
    return header


def npy_bytes(array: Any) -> bytes:
    """Return the content of a file of NumPy."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


Samples = Mapping[str, Mapping[str, bytes]]  # members by extension, by key


def samples(number: int, seed: int = 0, prefix: str = "") -> dict[str, dict[str, bytes]]:
    """Return samples with members of random contents and sizes. All members differ."""
    random = np.random.default_rng(seed)
    return {
        f"{prefix}{sample:05d}": {".bin": random.bytes(int(random.integers(0, 3000))), ".cls": b"%d" % (sample % 7)}
        for sample in range(number)
    }


def shard_bytes(contents: Samples, form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a shard with these samples."""
    return tar_bytes(
        ((f"{key}{extension}", content) for key, found in contents.items() for extension, content in found.items()),
        form,
    )


def write_shards(folder: Path, *shards: Samples) -> list[Path]:
    """Write shards as files ``0.tar``, ``1.tar`` and so on. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.tar" for number in range(len(shards))]
    for path, contents in zip(paths, shards, strict=True):
        path.write_bytes(shard_bytes(contents))
    return paths


def indexed(folder: Path, *shards: Samples, **options: Any) -> Path:
    """Write shards with an index ``index.json`` beside the shards. Return the index's path."""
    urls = [str(path) for path in write_shards(folder, *shards)]
    create_index(urls, folder / "index.json", progress="off", **options)
    return folder / "index.json"
