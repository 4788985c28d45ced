"""Images to shards: pack images, and verify the shards in the blob store.

Run it with ``flyte run --local flyte2/shards.py pack_and_verify --source FOLDER``.
"""

from dataclasses import dataclass

from flyte.io import Dir

from flyte2 import pods
from flyte2.files import output_folder
from flyte_ddp.task_bodies import shards as bodies
from flyteplugins.ddp.platform import task


@dataclass
class PackedShards:
    """The folder of shards, and the value of the hyperparameter ``dataset`` for training on the shards."""

    shards: Dir
    dataset: str


@task(pods.DATA, retries=pods.RETRIES, timeout=pods.HOURS)
def pack_and_verify(
    source: str, split: str = "train", name: str = "train", samples_per_shard: int = 1000, seed: int = 0
) -> PackedShards:
    """Pack images into shards with an index, and verify all shards at their final address.

    Returns the folder of shards, and the name of the data set, such as shards:s3://bucket/.../train.json. To train on
    the shards, give {"dataset": "shards:s3://..."} as the hyperparameters of training.

    Args:
        source: Folder of class/name.jpg (a path or an address), or name of a data set.
        split: Part of a data set to pack: train or test. For a folder leave train.
        name: Name of the index that is written, without .json.
        samples_per_shard: Images in each shard. The last shard may have fewer.
        seed: Seed of the order in which images are packed.
    """
    packed = output_folder(bodies.pack_shards(source, split, name, samples_per_shard, seed))
    return PackedShards(packed, bodies.verify_shards(packed.path, name))
