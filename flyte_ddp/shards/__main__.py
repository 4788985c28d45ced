"""The commands around shards: ``python -m flyte_ddp.shards --help``."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flyte_ddp.errors import UserError
from flyte_ddp.formatting import counted
from flyte_ddp.progress import MODES
from flyte_ddp.shards.plan_request import PlanRequest

if TYPE_CHECKING:
    from flyte_ddp.shards.index import ShardIndex

PROGRESS = click.option("--progress", type=click.Choice(MODES), default="auto")


def count_contents(index: ShardIndex) -> str:
    """Return how many shards and samples an index lists, in words."""
    return f"{counted(len(index.shards), 'shard')}, {counted(len(index), 'sample')}"


@click.group(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def shards() -> None:
    """Make, check and look at data sets of shards (tar files and an index in wids' format)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text


@shards.command()
@click.argument("urls", nargs=-1, required=True)
@click.option("--output", "-o", type=Path, default=Path("index.json"), help="The index to write.")
@click.option("--name", default="", help="Name of the data set; the index's own by default.")
@click.option("--classes", type=Path, help="A file with the classes' names, one a line; 0, 1, 2 ... without it.")
@PROGRESS
def create(urls: tuple[str, ...], output: Path, name: str, classes: Path | None, progress: str) -> None:
    """Read shards (paths, s3://, gs://, az://, http://; {000..127} stands for a range) and write their index."""
    from flyte_ddp.shards.scanning import create_index

    index = create_index(urls, output, name=name, classes=read_lines(classes), progress=progress)
    click.echo(
        f"{output}: {count_contents(index)}, {len(index.classes):,} class{'' if len(index.classes) == 1 else 'es'}"
    )


@shards.command()
@click.argument("indexes", nargs=-1, required=True)
@click.option("--output", "-o", type=Path, default=Path("joined.json"), help="The index to write.")
@click.option("--weight", "weights", type=float, multiple=True, help="Of each index in turn; all 1 without any.")
@click.option("--name", default="", help="Name of the whole; the index's own by default.")
def join(indexes: tuple[str, ...], output: Path, weights: tuple[float, ...], name: str) -> None:
    """Write one index that refers to several: an epoch goes through each so many times as its weight says."""
    from flyte_ddp.shards.joining import join_indexes

    index = join_indexes(indexes, output, weights=weights, name=name)
    click.echo(f"{output}: {counted(len(index.parts), 'data set')}, {count_contents(index)}")


@shards.command()
@click.argument("index")
@click.option("--decode", is_flag=True, help="Decode all images, and look whether training can read all samples.")
@PROGRESS
def verify(index: str, decode: bool, progress: str) -> None:
    """Read all shards of an index and say what is not as it says; exit status 1 if anything is."""
    from flyte_ddp.shards.scanning import verify_index

    problems = verify_index(index, decode=decode, progress=progress)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise UserError(f"index {index}: {counted(len(problems), 'problem')}")
    click.echo(f"{index}: all is as it says")


@shards.command()
@click.argument("index")
@click.option("--shards", "listed", is_flag=True, help="List the shards, too.")
def show(index: str, listed: bool) -> None:
    """Say what an index holds; no shard is opened."""
    from flyte_ddp.shards.index import read_index

    found = read_index(index)
    for key, value in found.summary().items():
        click.echo(f"{key:<16} {value}")
    if listed:
        for shard in found.shards:
            click.echo(f"{shard.samples:>10,} {max(0, shard.size):>15,} {shard.url}")


@shards.command()
@click.argument("index")
@click.argument("number", type=int)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="Write the members into this folder.")
def sample(index: str, number: int, to: Path | None) -> None:
    """Show one sample of an index; of a remote shard no more than that is read, where its index has tables."""
    from flyte_ddp.shards.inspection import read_sample, write_members

    found = read_sample(index, number)
    members = {name: value for name, value in found.items() if isinstance(value, bytes)}
    for name, value in members.items():
        small = len(value) <= 80 and value.isascii()
        found[name] = value.decode() if small else f"{len(value):,} bytes"
    if to is not None:
        write_members(found["__key__"], members, to)
    click.echo(json.dumps(found, indent=1, ensure_ascii=False))


@shards.command()
@click.argument("source")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", default="train", help="Of the data set, with which the files' names begin.")
@click.option("--samples-per-shard", default=1000)
@click.option("--order", type=click.Choice(["mixed", "own"]), default="mixed", help="Mixed at random, or as it is.")
@click.option("--seed", default=0, help="Of the mixed order.")
@click.option("--split", type=click.Choice(["train", "test"]), default="train", help="Of a data set that has both.")
@PROGRESS
def pack(
    *, source: str, folder: Path, name: str, samples_per_shard: int, order: str, seed: int, split: str, progress: str
) -> None:
    """Pack SOURCE into shards and an index in FOLDER.

    SOURCE is a folder or prefix of images (class/name.jpg; a path, s3://, gs:// or az://), the name of a data set
    (digits, mnist, fashion_mnist, cifar10), or package.module:callable for a pair (train, test) of torch-style data
    sets.
    """
    from flyte_ddp.datasets.packing import pack_source

    options = {"per_shard": samples_per_shard, "seed": seed if order == "mixed" else None, "progress": progress}
    index = pack_source(source, folder, split=split, name=name, **options)
    click.echo(f"{folder / name}.json: {count_contents(index)}")


def plan(**options: Any) -> None:
    """Say how many batches each rank gets, what is read and cached, and whether DDP would hang.

    INDEX is an index, of whose shards only the first sample is read; --shards, --samples and --size stand for one.
    """
    from flyte_ddp.shards.planning import describe_plan

    for line in describe_plan(PlanRequest(**options)):
        click.echo(line)


for entry in reversed(fields(PlanRequest)[1:]):
    flag = f"--{entry.name.replace('_', '-')}"
    click.option(flag, default=entry.default, is_flag=entry.default is False, help=entry.metadata["doc"])(plan)
shards.command()(click.argument("index", default="")(plan))


def read_lines(path: Path | None) -> list[str]:
    """Return the lines of a file but for empty ones at its end; none without a file."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip("\r\n").splitlines()  # Windows may begin it with a mark
    except OSError as error:
        raise UserError(f"classes {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"classes {path}: is not text in UTF-8 ({error})") from None
    if not lines:
        raise UserError(f"classes {path}: is empty; it must have the classes' names, one a line")
    return lines


if __name__ == "__main__":
    shards(prog_name="python -m flyte_ddp.shards")
