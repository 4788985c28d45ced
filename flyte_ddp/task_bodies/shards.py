"""Make data sets of shards: pack images, and verify the shards at their final address."""

from pathlib import Path

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.settings import read_settings
from flyte_ddp.core.text.formatting import format_count
from flyte_ddp.pods import paths


def pack_shards(source: str, split: str, name: str, samples_per_shard: int, seed: int) -> Path:
    """Pack images into shards with an index NAME.json in a new folder, and return the folder.

    In a local run, prints the index.

    Args:
        source: A folder of class/name.jpg, or the name of a data set.
        split: Part of a named data set: train or test.
        name: Name of the index.
        samples_per_shard: Images in each shard. The last shard may have fewer.
        seed: Seed of the order in which images are packed.
    """
    from flyte_ddp.datasets.packing import pack_source

    with paths.make_dated_folder("shards") as folder:
        pack_source(
            source,
            folder,
            split=split,
            name=name,
            samples_per_shard=samples_per_shard,
            seed=seed,
            progress=read_settings().progress,
        )
    index = folder / f"{name}.json"
    paths.print_local_files("packed into", {index: f"the index, a data set: shards:{index}"})
    return folder


def verify_shards(address: str, name: str) -> str:
    """Verify the shards of a folder, and return the value of the hyperparameter ``dataset`` for training on them.

    Reads all shards and decodes each image.

    Args:
        address: The folder, a path or an address.
        name: Name of the index in the folder.

    Raises:
        UserError: The shards differ from the index. The text has the first 20 differences.
    """
    from flyte_ddp.shards.scanning import verify_index

    index = f"{address.rstrip('/')}/{name}.json"
    problems = verify_index(index, decode=True, progress=read_settings().progress)
    if problems:
        raise UserError("\n".join([f"index {index}: {format_count(len(problems), 'problem')}", *problems[:20]]))
    return f"shards:{index}"
