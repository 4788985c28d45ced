"""Images to shards: pack images, and verify the shards in the blob store.

Run it with ``pyflyte run workflows/shards.py shards_wf --source FOLDER``.
"""

from flytekit import workflow

from tasks.shards import PackedShards, pack_shards, verify_packed


@workflow
def shards_wf(
    source: str, split: str = "train", name: str = "train", samples_per_shard: int = 1000, seed: int = 0
) -> PackedShards:
    """Pack images into shards with an index, and verify all shards at their final address.

    Returns the folder of shards, and the name of the data set, such as shards:s3://bucket/.../train.json. To train on
    the shards, give {"dataset": "shards:s3://..."} as the hyperparameters of training_wf.

    Args:
        source: Folder of class/name.jpg (a path or an address), or name of a data set.
        split: Part of a data set to pack: train or test. For a folder leave train.
        name: Name of the index that is written, without .json.
        samples_per_shard: Images in each shard. The last shard may have fewer.
        seed: Seed of the order in which images are packed.
    """
    packed = pack_shards(source=source, split=split, name=name, samples_per_shard=samples_per_shard, seed=seed)
    return verify_packed(packed=packed, name=name)
