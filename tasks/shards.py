"""Tasks that make data sets of shards: pack, index, verify. ``python -m flyte_ddp.shards`` has more commands."""

from typing import NamedTuple

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.task_bodies import shards
from tasks import pods
from tasks.flyte import flyte_task, output_folder


class PackedShards(NamedTuple):
    """The folder of shards, and the value of the hyperparameter ``dataset`` for training on the shards."""

    shards: FlyteDirectory
    dataset: str


@flyte_task(**pods.data_pod_options())
def pack_shards(
    source: str, split: str = "train", name: str = "train", samples_per_shard: int = 1000, seed: int = 0
) -> FlyteDirectory:
    """Pack images into shards with an index, and return the folder.

    The source is a folder of class/name.jpg, or the name of a data set. The split (train or test) applies to a named
    data set only. The seed shuffles the images. The index is NAME.json in the same folder.
    """
    return output_folder(shards.pack_shards(source, split, name, samples_per_shard, seed))


@flyte_task(**pods.data_pod_options())
def verify_packed(packed: FlyteDirectory, name: str = "train") -> PackedShards:
    """Verify shards at their final address, and return the folder and the name of the data set.

    Reads all shards and decodes each image. Fails with the first 20 differences from the index NAME.json.
    """
    return PackedShards(packed, shards.verify_shards(str(packed.remote_source or packed.path), name))
