"""Pack samples into shards with an index."""

import io
import itertools
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath

import numpy as np

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import replace_file
from flyte_ddp.core.lookahead import map_in_threads
from flyte_ddp.core.order import sampling
from flyte_ddp.core.progress import Progress
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.shards.index import ShardIndex
from flyte_ddp.shards.scanning import check_and_resolve_index_output, create_index, tables_path

AHEAD = 32  # threads that read samples

Members = Mapping[str, bytes]  # by extension


def pack_samples(
    make_sample: Callable[[int], tuple[str, Members]],
    count: int,
    folder: Path,
    *,
    classes: Sequence[str],
    name: str = "train",
    samples_per_shard: int = 1000,
    seed: int | None = 0,
    progress: str = "auto",
) -> ShardIndex:
    """Pack samples into shards (tar files), write their index ``<name>.json``, and return the index.

    ``make_sample`` is called in up to 32 threads, and its exceptions pass through. The samples of one shard are held in
    memory. The same samples give the same bytes. For the index, all shards are read again. After an error, no files
    remain, but threads may still run.

    Args:
        make_sample: Returns the key and members of the sample with a number below ``count``.
        count: Number of samples.
        folder: The folder for the shards and the index. Created if missing.
        classes: Names of the classes.
        name: Name of the data set, with which the files' names begin.
        samples_per_shard: Number of samples in each shard but the last.
        seed: Seed of a random order, or None to keep the order. Samples sorted by class should be mixed, because
            training mixes only neighbouring shards.
        progress: auto, bar, lines or off.

    Raises:
        UserError: An argument is out of range, class names are equal, a file exists, or the folder cannot be written.
            Also if samples have equal keys or unfit labels.
    """
    for option, value, least in (
        ("count", count, 1),
        ("samples_per_shard", samples_per_shard, 1),
        ("seed", seed or 0, 0),
    ):
        if value < least:
            raise UserError(f"{option}={value}: must be at least {least}")
    if not name or PurePath(name).name != name:
        raise UserError(f"name={name!r}: must be a valid file name")
    classes = normalize_class_names(name, classes)
    starts = range(0, count, samples_per_shard)
    digits = max(6, len(str(len(starts) - 1)))  # the same number for all shards, so that names sort by number
    paths = [folder / f"{name}-{number:0{digits}d}.tar" for number in range(len(starts))]
    index = check_and_resolve_index_output(folder / f"{name}.json")
    for path in (index, tables_path(index), *paths):
        if path.exists():
            raise UserError(f"{path}: already exists; remove the packed files, or choose another folder or name")
    order = np.arange(count)
    if seed is not None:
        order = sampling.make_generator(sampling.PACKING, seed).permutation(order)
    track = Progress(progress).track("packing", count, "samples")
    try:
        with map_in_threads(make_sample, order.tolist(), AHEAD) as made, track as advance:
            for path in paths:
                samples = list(
                    itertools.islice(made, samples_per_shard)
                )  # not inside replace_file(), which explains OSErrors of writing
                write_shard(path, samples, advance)
        shards = [str(path) for path in paths]
        return create_index(shards, index, name=name, classes=classes, ranges=False, progress="off")
    except BaseException:
        for path in filter(Path.exists, (index, tables_path(index), *paths)):
            path.unlink()
        raise


def write_shard(path: Path, samples: Iterable[tuple[str, Members]], advance: Callable[[int], object]) -> None:
    """Write samples (key and members) to a tar file at ``path``, which appears or is replaced when complete.

    ``advance(1)`` is called after each sample.

    Raises:
        UserError: The file cannot be written.
    """
    # wids reads long and non-ASCII names best in GNU's format.
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
