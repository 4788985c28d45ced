"""Packing samples into shards."""

import fcntl
import io
import itertools
import json
import os
import re
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from flyte_ddp.class_names import class_names
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.lookahead import map_in_threads
from flyte_ddp.order import sampling
from flyte_ddp.process import postponed
from flyte_ddp.progress import Progress
from flyte_ddp.shards.index import EXTENSION, ShardIndex, read_index
from flyte_ddp.shards.scanning import index_output, index_shards, tables_of

SAMPLES_PER_SHARD = 1000
AHEAD = 32  # images that are read at the same time

Members = Mapping[str, bytes]  # by extension


def pack(
    samples: Callable[[int], tuple[str, Members]],
    count: int,
    folder: Path,
    *,
    classes: Sequence[str],
    name: str = "train",
    per_shard: int = SAMPLES_PER_SHARD,
    seed: int | None = 0,
    progress: str = "auto",
) -> ShardIndex:
    """Write samples into shards and their index, ``<name>.json``, which comes last; return the index.

    The same samples make the same files to the last byte, whenever and wherever they are packed. What was packed under
    this name before stays as it is until all of the new is there; then it is replaced, and shards of it that the new
    one does not have are removed. Other files stay. Whatever ends this, the index is of whole shards, old or new.

    Args:
        samples: gives a sample's key and members by its number, and may be called from several threads.
        count: how many samples there are.
        folder: where to write; made if it is not there.
        classes: the classes' names, for the index.
        name: of the data set and the beginning of the files' names.
        per_shard: samples in a shard; the last one may have fewer.
        seed: of the order in which samples are packed; None keeps their own. Training mixes neighbouring shards only,
            so that samples in an order of their own (class by class) should be mixed here.
        progress: auto, bar, lines or off; on stderr.

    Raises:
        UserError: no samples, one that cannot be had, a class whose name is not UTF-8, a folder that cannot be written
            to, or a file in the index's place that is none; all is as it was then.
    """
    if count == 0:
        raise UserError(f"{name}: there is no sample to pack")
    for option, value, least in (("samples_per_shard", per_shard, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{option}={value}: must be at least {least}")
    if not name or PurePath(name).name != name:
        raise UserError(f"name={name!r}: must be fit for a file's name")
    classes = class_names(name, classes)
    index = index_output(folder / f"{name}.json")
    order = np.arange(count)
    if seed is not None:
        order = sampling.random_stream(sampling.PACKING, seed).permutation(order)
    starts = range(0, count, per_shard)
    digits = max(6, len(str(len(starts) - 1)))
    track = Progress(progress).track("packing", count, "samples")
    with open_workspace(index) as workspace:
        paths = [workspace / f"{name}-{number:0{digits}d}.tar" for number in range(len(starts))]
        with map_in_threads(samples, order.tolist(), AHEAD) as made, track as advance:
            for path in paths:
                write_shard(path, itertools.islice(made, per_shard), advance)
        urls = [str(path) for path in paths]
        index_shards(urls, workspace / index.name, name=name, classes=classes, progress="off", packed=True)
        publish_packed_shards(workspace, index)
    return read_index(str(index))


@contextmanager
def open_workspace(index: Path) -> Iterator[Path]:
    """Make and lock a hidden folder beside the index, and remove it at the end of the block.

    First finishes what a killed packing of this index has left in the folder. The folder stays if the index refers to
    shards in it at the end. Raises UserError if another process is packing this index, or it cannot be written.
    """
    workspace = index.with_name(f".{index.stem}.packing")
    with ExitStack() as stack:
        try:
            workspace.mkdir(parents=True, exist_ok=True)
            held = os.open(workspace, os.O_RDONLY)
            stack.callback(os.close, held)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{index}: another process is packing it; wait for its end, or take another name") from None
        except OSError as error:
            raise UserError(f"cannot write {index}: {error.strerror}; choose another folder") from None
        move_shards(workspace, index)
        for path in workspace.iterdir():
            path.unlink()
        try:
            yield workspace
        finally:
            if not refers_to(workspace, index):
                shutil.rmtree(workspace, ignore_errors=True)


def publish_packed_shards(workspace: Path, index: Path) -> None:
    """Replace the index and its shards with those in the workspace.

    (1) Put an index in place, by one rename, that refers to the shards in the workspace: the commit point. (2) Remove
    the old shards, which may have the same names, and give the new ones their place. (3) Put the final index in place.
    SIGINT is delayed throughout; after a kill, the next packing finishes.
    """
    content = load_json(workspace / index.name)
    content |= {"packed_in": workspace.name, "replaced": list_packed(index)}
    for entry, key in (*((entry, "url") for entry in content["shardlist"]), (content[EXTENSION], "tables")):
        entry[key] = f"{workspace.name}/{entry[key]}"
    following = workspace / "index"
    with replacing(following) as file:
        file.write(json.dumps(content).encode())
    with postponed(signal.SIGINT):
        following.replace(index)
        move_shards(workspace, index)


def refers_to(workspace: Path, index: Path) -> bool:
    """Return whether the shards of the index are still in the workspace."""
    return (workspace / index.name).exists() and load_json(index).get("packed_in") == workspace.name


def move_shards(workspace: Path, index: Path) -> None:
    """Move shards from the workspace to where they belong, and then the index, if it refers to shards there.

    A process that is killed in between leaves the rest to the next one that packs here.
    """
    if not refers_to(workspace, index):
        return
    try:
        for name in load_json(index)["replaced"]:
            index.with_name(name).unlink(missing_ok=True)
        for name in (*list_packed(workspace / index.name), tables_of(index).name):
            link_or_copy(workspace / name, index.with_name(name))
        (workspace / index.name).replace(index)
    except OSError as error:
        raise UserError(f"cannot write {index}: {error.strerror}; fix that, and pack again") from None


def link_or_copy(path: Path, target: Path) -> None:
    """Give a file a second name, in place of another file; copy it where the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(path)
    except OSError:
        copy = path.with_suffix(".copy")  # in the workspace, whose files go if this process is killed
        shutil.copyfile(path, copy)
        copy.replace(target)


def load_json(index: Path) -> dict[str, Any]:
    """Return what is in the file of an index; nothing without one."""
    content: dict[str, Any] = json.loads(index.read_bytes()) if index.is_file() else {}
    return content


def list_packed(index: Path) -> list[str]:
    """Return the names of the shards that were packed with an index; none of those that somebody else has made."""
    content = load_json(index)
    if not (content.get(EXTENSION) or {}).get("packed"):
        return []
    names = (str(entry["url"]) for entry in content["shardlist"])
    return [name for name in names if re.fullmatch(rf"{re.escape(index.stem)}-\d{{6,}}\.tar", name)]


def write_shard(path: Path, samples: Iterable[tuple[str, Members]], advance: Callable[[int], object]) -> None:
    """Write samples into a tar file, and call ``advance(1)`` after each."""
    # Of the formats for long names and others than English ones it is GNU's that wids reads best.
    with (
        replacing(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as tar,
    ):
        for key, members in samples:
            for extension, content in members.items():
                header = tarfile.TarInfo(f"{key}{extension}")
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))
            advance(1)
