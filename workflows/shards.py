"""Images to shards: packed, and checked as they lie in the blob store.

Run it with ``pyflyte run workflows/shards.py shards_wf --source FOLDER``.
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from tasks.shards import pack_shards, verify_packed


@workflow
def shards_wf(
    source: str, split: str = "train", name: str = "train", samples_per_shard: int = 1000, seed: int = 0
) -> FlyteDirectory:
    """Pack images into shards with an index, and check all of it where it was put."""
    packed = pack_shards(source=source, split=split, name=name, samples_per_shard=samples_per_shard, seed=seed)
    return verify_packed(packed=packed, name=name)
