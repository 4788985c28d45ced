"""Pack samples into shards with an index, in place of those that were packed before."""

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

from flyte_ddp.errors import UserError
from flyte_ddp.files import replace_file
from flyte_ddp.lookahead import map_in_threads
from flyte_ddp.machine.process import postpone_signal
from flyte_ddp.order import sampling
from flyte_ddp.progress import Progress
from flyte_ddp.samples.class_names import normalize_class_names
from flyte_ddp.shards.index import EXTENSION, ShardIndex, read_index
from flyte_ddp.shards.scanning import index_shards, resolve_index_output, tables_path

AHEAD = 32  # threads that read samples

Members = Mapping[str, bytes]  # by extension


def pack_samples(
    make_sample: Callable[[int], tuple[str, Members]],
    count: int,
    folder: Path,
    *,
    classes: Sequence[str],
    name: str = "train",
    per_shard: int = 1000,
    seed: int | None = 0,
    progress: str = "auto",
) -> ShardIndex:
    """Pack samples into shards (tar files) and their index ``<name>.json`` in a folder; return the index.

    Calls ``make_sample`` with each number below ``count``, in up to 32 threads; it returns a sample's key and members.
    Its exceptions reach the caller. ``seed`` mixes the samples; None keeps their order. Samples sorted by class should
    be mixed, because training mixes only neighbouring shards. The same samples make the same bytes. Replaces shards and
    index of an earlier packing when all new shards are complete. After a failure or a kill, the index refers to
    complete shards, old or new. Delays SIGINT while it replaces them. Raises UserError if an argument is out of range,
    the folder cannot be written, or another process is packing this index.
    """
    if count == 0:
        raise UserError(f"{name}: there is no sample to pack")
    for option, value, least in (("samples_per_shard", per_shard, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{option}={value}: must be at least {least}")
    if not name or PurePath(name).name != name:
        raise UserError(f"name={name!r}: must be fit for a file's name")
    classes = normalize_class_names(name, classes)
    index = resolve_index_output(folder / f"{name}.json")
    order = np.arange(count)
    if seed is not None:
        order = sampling.make_generator(sampling.PACKING, seed).permutation(order)
    starts = range(0, count, per_shard)
    digits = max(6, len(str(len(starts) - 1)))  # as many for all shards, so that their names are in order
    failures = list[Exception]()

    def take_until_failure(made: Iterator[tuple[str, Members]]) -> Iterator[tuple[str, Members]]:
        try:
            yield from made
        except Exception as error:  # in write_shard, an OSError would be taken for a failure to write
            failures.append(error)

    track = Progress(progress).track("packing", count, "samples")
    with open_workspace(index) as workspace:
        paths = [workspace / f"{name}-{number:0{digits}d}.tar" for number in range(len(starts))]
        with map_in_threads(make_sample, order.tolist(), AHEAD) as made, track as advance:
            samples = take_until_failure(made)
            for path in paths:
                write_shard(path, itertools.islice(samples, per_shard), advance)
                if failures:
                    raise failures[0]
        urls = [str(path) for path in paths]
        index_shards(urls, workspace / index.name, name=name, classes=classes, progress="off", packed=True)
        publish_packed_shards(workspace, index)
    return read_index(str(index))


def write_shard(path: Path, samples: Iterable[tuple[str, Members]], advance: Callable[[int], object]) -> None:
    # For names that are long or not ASCII, wids reads GNU's format best.
    with (
        replace_file(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8") as tar,
    ):
        for key, members in samples:
            for extension, content in members.items():
                header = tarfile.TarInfo(f"{key}{extension}")
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))
            advance(1)


@contextmanager
def open_workspace(index: Path) -> Iterator[Path]:
    """Yield an empty locked folder beside the index; first complete an earlier packing that was killed."""
    workspace = index.with_name(f".{index.stem}.packing")
    with ExitStack() as stack:
        try:
            workspace.mkdir(parents=True, exist_ok=True)
            while not lock_folder(workspace, stack):  # another packing has ended, and removed it
                workspace.mkdir(exist_ok=True)
        except BlockingIOError:
            raise UserError(f"{index}: another process is packing it; wait for its end, or take another name") from None
        except OSError as error:
            raise UserError(f"cannot write {index}: {error.strerror}; choose another folder") from None
        move_packed_shards(workspace, index)
        for path in workspace.iterdir():
            path.unlink()
        try:
            yield workspace
        finally:
            if not index_refers_to(workspace, index):
                shutil.rmtree(workspace, ignore_errors=True)


def lock_folder(folder: Path, stack: ExitStack) -> bool:
    """Lock a folder until ``stack`` ends; return whether it still exists. Raises BlockingIOError if it is locked."""
    try:
        held = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    stack.callback(os.close, held)
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.fstat(held).st_nlink > 0


def publish_packed_shards(workspace: Path, index: Path) -> None:
    """Replace the index and its shards with those in the folder ``workspace``.

    (1) Rename an index into place that refers to the shards in the workspace: the commit point. (2) Move the shards to
    their final names. (3) Rename the final index into place. After a kill in between, the next packing does the rest.
    """
    content = read_json_or_empty(workspace / index.name)
    content |= {"packed_in": workspace.name, "replaced": list_packed_shards(index)}
    for entry, key in (*((entry, "url") for entry in content["shardlist"]), (content[EXTENSION], "tables")):
        entry[key] = f"{workspace.name}/{entry[key]}"
    interim_index = workspace / "index"
    with replace_file(interim_index) as file:
        file.write(json.dumps(content).encode())
    with postpone_signal(signal.SIGINT):
        interim_index.replace(index)
        move_packed_shards(workspace, index)


def index_refers_to(workspace: Path, index: Path) -> bool:
    """Return whether the index refers to shards in the workspace: a packing is published in part."""
    return (workspace / index.name).exists() and read_json_or_empty(index).get("packed_in") == workspace.name


def move_packed_shards(workspace: Path, index: Path) -> None:
    """Move shards and their index to their final places if the index refers to shards in the workspace."""
    if not index_refers_to(workspace, index):
        return
    try:
        for name in read_json_or_empty(index)["replaced"]:
            index.with_name(name).unlink(missing_ok=True)
        # Each shard keeps its name in the workspace as well, so the interim index is valid until it is replaced.
        for name in (*list_packed_shards(workspace / index.name), tables_path(index).name):
            link_or_copy_file(workspace / name, index.with_name(name))
        (workspace / index.name).replace(index)
    except OSError as error:
        raise UserError(f"cannot write {index}: {error.strerror}; fix that, and pack again") from None


def link_or_copy_file(path: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(path)
    except OSError:
        copy = path.with_suffix(".copy")  # in the workspace, which the next packing empties if this process is killed
        shutil.copyfile(path, copy)
        copy.replace(target)


def read_json_or_empty(index: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(index.read_bytes()) if index.is_file() else {}
    return content


def list_packed_shards(index: Path) -> list[str]:
    """Return the names of the shards packed with an index; [] if it is missing or was not made by packing."""
    content = read_json_or_empty(index)
    if not (content.get(EXTENSION) or {}).get("packed"):
        return []
    names = (str(entry["url"]) for entry in content["shardlist"])
    return [name for name in names if re.fullmatch(rf"{re.escape(index.stem)}-\d{{6,}}\.tar", name)]
