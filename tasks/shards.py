"""Tasks around data sets of shards: pack, index, join, check, look, plan. Each calls one function of the library."""

from pathlib import Path
from typing import List, NamedTuple, Optional

from flytekit import Deck
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.formatting import format_count
from flyte_ddp.pods import paths
from flyte_ddp.pods.platforms import is_in_pod
from flyte_ddp.settings import read_settings
from flyte_ddp.shards.plan_request import PlanRequest
from tasks import pods
from tasks.flyte import flyte_task, output_folder


class PackedShards(NamedTuple):
    """The folder of shards, and its name as a data set: the value of the hyperparameter ``dataset``."""

    shards: FlyteDirectory
    dataset: str


@flyte_task(**pods.data_pod())
def pack_shards(
    source: str,
    split: str = "train",
    name: str = "train",
    samples_per_shard: int = 1000,
    seed: int = 0,
    order: str = "mixed",
) -> FlyteDirectory:
    """Pack images into shards with an index: a folder of class/name.jpg, a data set by its name, or one's own.

    Give as source the folder, the name, or package.module:callable; the split (train or test) is of the last two. The
    seed mixes the images, or order="own" keeps their order. Returns a folder with the shards and the index NAME.json.
    """
    from flyte_ddp.datasets.packing import pack_source

    if order not in ("mixed", "own"):
        raise unknown_name_error("order", order, ("mixed", "own"))
    with paths.make_dated_folder("shards") as folder:
        pack_source(
            source,
            folder,
            split=split,
            name=name,
            per_shard=samples_per_shard,
            seed=seed if order == "mixed" else None,
            progress=read_settings().progress,
        )
    return index_output(folder, name, "packed into")


@flyte_task(**pods.data_pod())
def index_shards(urls: List[str], name: str = "train", classes: Optional[List[str]] = None) -> FlyteDirectory:
    """Read all shards at the addresses and make their index; {000..127} in an address stands for a range of numbers.

    Returns a folder with the index NAME.json. Without classes, these are named 0, 1, 2 up to the highest label.
    """
    from flyte_ddp.shards.scanning import create_index

    progress = read_settings().progress
    with paths.make_dated_folder("index") as folder:
        create_index(urls, folder / f"{name}.json", name=name, classes=classes or [], progress=progress)
    return index_output(folder, name, "indexed in")


@flyte_task(**pods.light_pod())
def join_shards(indexes: List[str], weights: Optional[List[float]] = None, name: str = "train") -> FlyteDirectory:
    """Join several indexes into one: an epoch reads each of them as many times as its weight says, by default once.

    Give the addresses of the indexes, which are read; no shard is. Returns a folder with the index NAME.json.
    """
    from flyte_ddp.shards.joining import join_indexes

    with paths.make_dated_folder("index") as folder:
        join_indexes(indexes, folder / f"{name}.json", weights=weights or [], name=name)
    return index_output(folder, name, "joined in")


def index_output(folder: Path, name: str, headline: str) -> FlyteDirectory:
    """Return a folder with an index NAME.json as a task's output; in a local run, print where the index is."""
    index = folder / f"{name}.json"
    paths.print_local_files(headline, {index: f"the index, a data set: shards:{index}"})
    return output_folder(folder)


@flyte_task(**pods.data_pod())
def verify_shards(index: str, decode: bool = False) -> str:
    """Read all shards of an index, and fail with the first 20 differences from it; with decode, also decode each image.

    Give the address of the index. Returns a sentence that no shard differs.
    """
    refuse_damaged_shards(index, decode=decode)
    return f"{index}: no shard differs from it"


@flyte_task(**pods.data_pod(), **pods.WITH_DECK)
def verify_packed(packed: FlyteDirectory, name: str = "train") -> PackedShards:
    """Check the shards that pack_shards returned where they were put, and return them with their name as a data set.

    Reads all shards and decodes each image; fails with the first 20 differences from the index NAME.json. In a pod,
    shows some of the images on the task's page.
    """
    from flyte_ddp.report import previews

    index = f"{str(packed.remote_source or packed.path).rstrip('/')}/{name}.json"
    refuse_damaged_shards(index, decode=True)
    if is_in_pod():
        Deck("Shards", previews.render_index_preview(index))
    return PackedShards(shards=packed, dataset=f"shards:{index}")


def refuse_damaged_shards(index: str, *, decode: bool) -> None:
    from flyte_ddp.shards.scanning import verify_index

    problems = verify_index(index, decode=decode, progress=read_settings().progress)
    if problems:
        raise UserError("\n".join([f"index {index}: {format_count(len(problems), 'problem')}", *problems[:20]]))


@flyte_task(**pods.light_pod())
def show_shards(index: str) -> str:
    """Describe the index at an address, without opening a shard: name, shards, samples, bytes, classes and more."""
    from flyte_ddp.shards.index import read_index

    return "\n".join(f"{key}: {value}" for key, value in read_index(index).summary().items())


@flyte_task(**pods.light_pod())
def sample_shards(index: str, number: int) -> FlyteDirectory:
    """Read one sample of an index by its number, from 0; from its part of a shard, or from the whole shard.

    Returns a folder with the sample's members, such as its image and its label, as files.
    """
    from flyte_ddp.shards.inspection import read_sample, write_members

    sample = read_sample(index, number)
    members = {name: value for name, value in sample.items() if isinstance(value, bytes)}
    with paths.make_dated_folder("sample") as folder:
        write_members(sample["__key__"], members, folder)
    paths.print_local_files(f"sample {sample['__key__']} in", {folder: ", ".join(members)})
    return output_folder(folder)


@flyte_task(**pods.light_pod())
def plan_shards(request: PlanRequest) -> str:
    """Describe a training on shards: batches of each rank, what nodes read and cache, and whether DDP would hang.

    Give an index, or numbers of shards and samples, and how many nodes and ranks there are. Fails if DDP would hang.
    """
    from flyte_ddp.shards.planning import describe_plan

    return "\n".join(describe_plan(request))
