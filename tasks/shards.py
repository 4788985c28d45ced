"""Tasks that make data sets of shards: pack, index, check. ``python -m flyte_ddp.shards`` has the rest."""

from pathlib import Path
from typing import List, NamedTuple, Optional

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.errors import UserError, unknown_name_error
from flyte_ddp.pods import paths
from flyte_ddp.settings import read_settings
from flyte_ddp.text.formatting import format_count
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
    """Pack images into shards with an index: a folder of class/name.jpg, or a data set by its name.

    Give as source the folder or the name; the split (train or test) is of a name. The seed mixes the images, or
    order="own" keeps their order. Returns a folder with the shards and the index NAME.json.
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


def index_output(folder: Path, name: str, headline: str) -> FlyteDirectory:
    """Return a folder with an index NAME.json as a task's output; in a local run, print where the index is."""
    index = folder / f"{name}.json"
    paths.print_local_files(headline, {index: f"the index, a data set: shards:{index}"})
    return output_folder(folder)


@flyte_task(**pods.data_pod())
def verify_packed(packed: FlyteDirectory, name: str = "train") -> PackedShards:
    """Check the shards that pack_shards returned where they were put, and return them with their name as a data set.

    Reads all shards and decodes each image; fails with the first 20 differences from the index NAME.json.
    """
    from flyte_ddp.shards.scanning import verify_index

    index = f"{str(packed.remote_source or packed.path).rstrip('/')}/{name}.json"
    problems = verify_index(index, decode=True, progress=read_settings().progress)
    if problems:
        raise UserError("\n".join([f"index {index}: {format_count(len(problems), 'problem')}", *problems[:20]]))
    return PackedShards(shards=packed, dataset=f"shards:{index}")
