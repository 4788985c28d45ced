"""Images a second from local shards, as random crops of 224 pixels with 2 workers: ours and its peers.

Each side is a separate process, and its second epoch counts. The peers are measured as documented, and also with our
decoder and torchvision's transforms on uint8 (see benchmarks/image_loaders.py). The bound is decoding and cropping
images that are in memory, without reading and without making batches. Two threads and two processes are tried, and
the faster counts. With eight times the shards, and thus images, each image must cost the same.
"""

from collections.abc import Callable
from typing import Any

from benchmarks import generated_images
from benchmarks.image_loaders import SIDES, write_chunks
from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call

SHARDS, MORE = 8, 8
BARE = ("decode and crop alone, threads", "decode and crop alone, processes")
MANY = f"ours, {MORE} x the shards"


def measure(options: Options) -> Result:
    samples_per_shard = 20 if options.quick else 500
    images = SHARDS * samples_per_shard
    few = generated_images.write_shards(options.folder / "few", SHARDS, samples_per_shard)
    many = generated_images.write_shards(options.folder / "many", SHARDS * MORE, samples_per_shard)
    order: dict[str, Any] = {"batch_size": 64, "dataset": f"shards:{few}"}
    order |= {"chunks": write_chunks(options.folder / "chunks", images)}
    order |= {"test_dataset": f"shards:{generated_images.write_shards(options.folder / 'tests', 1, 10)}"}
    order |= {"images": images, "epochs": 2}
    size = sum(len(generated_images.content(number)) for number in range(images)) // images
    result = Result(settings={"shards": SHARDS, "images": images, "bytes_per_image": size, "batch_size": 64})

    def side(name: str, **changes: Any) -> Callable[[int], None]:
        def run(_: int) -> None:
            found = call("benchmarks.image_loaders:measure_loader", order | {"side": name} | changes)
            label = MANY if changes else name
            result.add(label, found["rate"], "images/s")
            if name == "ours":
                result.add(f"{label}: memory", found["memory"] / 2**20, "MiB")

        return run

    sides = {name: side(name) for name in SIDES}
    interleaved(options, result, {**sides, MANY: side("ours", dataset=f"shards:{many}")}, options.number(5))
    for group, bound in (("as documented", 2.0), ("our decoder", 1.15)):
        measured = [name for name in SIDES if name.endswith(group) and name in result.series]
        if not measured:
            continue
        best = max(measured, key=result.median)
        ratio = result.ratio(f"ours / {best}", "ours", best)
        result.targets.append(Target(f"ours against the best of the peers, {group} ({best})", ratio, "x", bound))
    best = max(BARE, key=result.median)
    share = result.ratio(f"ours, uint8 / {best}", "ours, uint8", best)
    result.targets.append(Target("share of decoding and cropping alone", share, "%", 0.8))
    ratio = result.ratio(f"{MANY} / ours", MANY, "ours")
    result.targets.append(Target(f"images/s with {MORE} x the shards", ratio, "x", at_least=0.95))
    ratio = result.ratio(f"memory, {MANY} / ours", f"{MANY}: memory", "ours: memory")
    result.targets.append(Target(f"memory with {MORE} x the shards", ratio, "x", at_most=1.05))
    return result
