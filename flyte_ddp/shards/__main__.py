"""The commands for shards (``python -m flyte_ddp.shards --help``)."""

from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.progress import MODES
from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.shards.index import ShardIndex, read_index
from flyte_ddp.shards.scanning import create_index, join_indexes, verify_index
from flyte_ddp.shards.stream_plan import Loaders, StreamPlan

PROGRESS = click.option("--progress", type=click.Choice(MODES), default="auto")


def format_counts(index: ShardIndex) -> str:
    return f"{format_count(len(index.shards), 'shard')}, {format_count(len(index), 'sample')}"


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def shards() -> None:
    """Make and verify data sets of shards (tar files and an index in wids' format)."""


@shards.command("create")
@click.argument("urls", nargs=-1, required=True)
@click.option("--output", "-o", type=Path, default=Path("index.json"), help="The index to write.")
@click.option("--name", default="", help="Name of the data set; by default the name of the output file.")
@click.option(
    "--classes",
    type=click.File(encoding="utf-8-sig"),
    help="A file with a class name in each line; by default 0, 1, 2 ...",
)
@PROGRESS
def write_index_of_shards(
    urls: tuple[str, ...], output: Path, name: str, classes: TextIO | None, progress: str
) -> None:
    """Write an index of shards, and a .tables file beside the index.

    Reads all shards completely (paths, s3://, gs://, az://, http://). In an address, {000..127} stands for a range of
    numbers.
    """
    names = classes.read().rstrip("\n").splitlines() if classes else []
    if classes and not all(names or [""]):
        raise UserError(f"classes {classes.name}: must have a class name in each line")
    index = create_index(urls, output, name=name, classes=names, progress=progress)
    click.echo(f"{output}: {format_counts(index)}, classes: {len(index.classes):,}")


@shards.command("join")
@click.argument("indexes", nargs=-1, required=True)
@click.option("--output", "-o", type=Path, default=Path("joined.json"), help="The index to write.")
@click.option(
    "--weight", "weights", type=float, multiple=True, help="Passes through each index in an epoch; default 1."
)
@click.option("--name", default="", help="Name of the joined data set; by default the name of the output file.")
def write_joined_index(indexes: tuple[str, ...], output: Path, weights: tuple[float, ...], name: str) -> None:
    """Write an index that refers to several indexes.

    The weight of an index is the number of passes through its samples in an epoch.
    """
    index = join_indexes(indexes, output, weights=weights, name=name)
    click.echo(f"{output}: {format_count(len(index.parts), 'data set')}, {format_counts(index)}")


@shards.command("verify")
@click.argument("index")
@click.option("--decode", is_flag=True, help="Also decode all images, and count samples that training cannot read.")
@PROGRESS
def print_differences_from_index(index: str, decode: bool, progress: str) -> None:
    """Read all shards of an index completely and print each difference from the index.

    If any shard differs, the exit status is 1.
    """
    problems = verify_index(index, decode=decode, progress=progress)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise UserError(f"index {index}: {format_count(len(problems), 'problem')}")
    click.echo(f"{index}: all shards match the index")


@shards.command("pack")
@click.argument("source")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", default="train", help="Name of the data set; the files' names begin with it.")
@click.option("--samples-per-shard", default=1000)
@click.option("--order", type=click.Choice(["mixed", "own"]), default="mixed", help="Random order, or the source's.")
@click.option("--seed", default=0, help="Seed of the mixed order.")
@click.option(
    "--split", type=click.Choice(["train", "test"]), default="train", help="Split to pack, of a named data set."
)
@PROGRESS
def pack_source_into_shards(
    *, source: str, folder: Path, name: str, samples_per_shard: int, order: str, seed: int, split: str, progress: str
) -> None:
    """Pack SOURCE into shards, and write their index, in FOLDER.

    SOURCE is a folder or prefix of images with one folder for each class (class/name.jpg), as a path, s3://, gs:// or
    az://. SOURCE may also be the name of a data set: digits, or mnist, fashion_mnist or cifar10, which are downloaded.
    FOLDER must not contain a data set of the name given by --name.
    """
    from flyte_ddp.datasets.packing import pack_source  # a higher layer that only this command uses

    options = {"samples_per_shard": samples_per_shard, "seed": seed if order == "mixed" else None, "progress": progress}
    index = pack_source(source, folder, split=split, name=name, **options)
    click.echo(f"{folder / name}.json: {format_counts(index)}")


@shards.command("plan")
@click.argument("index", default="")
@click.option("--shards", "num_shards", default=0, help="Number of shards, if INDEX is not given.")
@click.option("--samples", default=0, help="Samples in each of these shards.")
@click.option("--ranks", type=click.IntRange(1), default=1)
@click.option("--workers", default=0, help="Loader processes of each rank.")
@click.option("--batch-size", type=click.IntRange(1), default=128, help="Samples in a batch of each rank.")
@click.option("--nbatches", default=0, help="Batches after which each rank stops; 0 for no limit.")
@click.option("--partial", is_flag=True, help="Keep batches that are not full.")
@click.option("--repeat", default=1, help="Passes of each rank's loader.")
@click.option("--dsrepeat", default=1, help="Passes of each worker over its shards.")
def print_stream_plan(index: str, num_shards: int, samples: int, **options: Any) -> None:
    """Print how many batches each rank would get if webdataset streamed the shards.

    INDEX is the address of an index. Without INDEX, give --shards and --samples. If ranks get different numbers of
    batches, DDP would hang, and the exit status is 1. The exit status is also 1 if a worker has no samples or no rank
    gets a batch.
    """
    counts = read_index(index).counts if index else np.full(num_shards, samples)
    planned = StreamPlan(Loaders(**options), counts)
    for line in planned.describe_in_lines():
        click.echo(line)
    planned.require_equal_batch_counts()


if __name__ == "__main__":
    shards(prog_name="python -m flyte_ddp.shards")
