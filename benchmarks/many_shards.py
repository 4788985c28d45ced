"""Start-up on an index of 100,000 shards of 1,000 samples: what the launcher does once, and then each rank.

The launcher reads the index, with all that an index of ours has, writes down what ranks need, and looks it over; a rank
opens that, divides the samples up, and knows the first batch of an epoch, shuffled, and the one in its middle. Of the
shards only the first is there, with a sample that the launcher looks at. What a run reads the index once more for, to
know whether its data are the same, is not in it.
"""

import io
import tarfile
import time
from pathlib import Path

import torch

from benchmarks.measuring import Options, Result, Target
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.prepared import check_prepared_set
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.loading.opening import open_splits
from flyte_ddp.settings import Settings
from flyte_ddp.shards.index import Shard, ShardIndex, index_json

SAMPLES, SIZE, TABLE = 1000, 40_000_000, 9_000  # of each shard; the last two in bytes


def measure(options: Options) -> Result:
    """All of it, in one process that has imported what it needs."""
    shards = 1000 if options.quick else 100_000
    result = Result(settings={"shards": shards, "samples_per_shard": SAMPLES, "batch_size": 1024})
    index = options.folder / "train.json"
    listed = [
        Shard(
            url=f"{options.folder}/train-{number:06d}.tar",
            samples=SAMPLES,
            size=SIZE,
            md5=f"{number:032x}",
            sha256=f"{number:064x}",
            table=("", number * TABLE, TABLE, f"{number:032x}"),
        )
        for number in range(shards)
    ]
    index.write_bytes(index_json(ShardIndex("train", listed, classes=("a", "b")), str(options.folder), "train.tables"))
    with tarfile.open(options.folder / "train-000000.tar", "w") as archive:
        for name in ("0.jpg", "0.cls"):
            header = tarfile.TarInfo(name)
            header.size = 1
            archive.addfile(header, io.BytesIO(b"0"))
    hp = Hyperparameters(dataset=f"shards:{index}", batch_size=1024, num_ranks=1)
    for repeat in range(options.number(7)):
        launcher, rank = start_up(hp, options.folder / f"prepared-{repeat}")
        result.add("launcher", launcher, "s")
        result.add("each rank", rank, "s")
        result.add("both", launcher + rank, "s")
    result.targets.append(Target(f"start-up on {shards:,} shards", result.median("both"), "s", at_most=2.0))
    return result


def start_up(hp: Hyperparameters, folder: Path) -> tuple[float, float]:
    """Seconds of the launcher and of a rank."""
    begin = time.perf_counter()
    prepared = fetch(hp.dataset, "", folder, progress="off")
    check_prepared_set(prepared, hp)
    middle = time.perf_counter()
    settings = Settings(progress="off", cache_folder=folder / "cache", loaders=1)
    splits = open_splits(open_prepared(prepared), hp, detect_hardware(hp), torch.device("cpu"), settings)
    order = splits.training.order
    batches = -(-len(order) // hp.batch_size)
    for first in (0, batches // 2):
        next(order.batches(0, hp.batch_size, first=first))
    end = time.perf_counter()
    splits.close()
    return middle - begin, end - middle
