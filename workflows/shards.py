"""Images to shards: packed, and checked as they lie in the blob store.

Run it with ``pyflyte run workflows/shards.py shards_wf --source FOLDER``.
"""

from flytekit import workflow

from tasks.shards import PackedShards, pack_shards, verify_packed


@workflow
def shards_wf(
    source: str, split: str = "train", name: str = "train", samples_per_shard: int = 1000, seed: int = 0
) -> PackedShards:
    """Pack images into shards with an index, and check all of it where it was put.

    In: a folder of class/name.jpg (a path, or an address such as s3://bucket/images), a data set by its name, or your
    own (package.module:callable). Out: the folder of shards, and the name of the data set that they are, such as
    shards:s3://bucket/.../train.json: give it to training_wf as dataset, in {"dataset": "shards:s3://..."}.

    Args:
        source: Folder of class/name.jpg, name of a data set, or your own package.module:callable.
        split: Part of a data set to pack: train or test. For a folder leave train.
        name: Name of the index that is made, without .json.
        samples_per_shard: Images in each shard; the last one may have fewer.
        seed: Seed of the order in which images are packed.
    """
    packed = pack_shards(source=source, split=split, name=name, samples_per_shard=samples_per_shard, seed=seed)
    return verify_packed(packed=packed, name=name)
