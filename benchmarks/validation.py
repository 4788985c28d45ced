"""Images a second that are looked at before training: photos in shards, and arrays. The bound is decoding alone."""

import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks import generated_images
from benchmarks.measuring import Options, Result, Target, interleaved
from flyte_ddp.datasets import fetch
from flyte_ddp.loading.decoding import decode_image
from flyte_ddp.loading.encoded import limit_threads
from flyte_ddp.machine import count_cores
from flyte_ddp.settings import Settings
from flyte_ddp.validation.profiling import compute_profile


def measure(options: Options) -> Result:
    """All sides in turn."""
    images = 40 if options.quick else 2000
    index = generated_images.write_shards(options.folder / "photos", 4, images // 4)
    photos = fetch(f"shards:{index}", "", options.folder / "prepared", progress="off")
    arrays = fetch("digits" if options.quick else "fashion_mnist", "", options.folder / "arrays", progress="off")
    contents = [generated_images.content(number) for number in range(images)]
    result = Result(settings={"photos": images, "threads": count_cores()})

    def rate(name: str, number: int, began: float) -> None:
        result.add(name, number / (time.perf_counter() - began), "images/s")

    def looking(_: int) -> None:
        began = time.perf_counter()
        found = compute_profile(photos, Settings(progress="off"))
        rate("photos", found.training.samples + found.test.samples, began)

    def decoding(_: int) -> None:
        with ThreadPoolExecutor(count_cores(), initializer=limit_threads) as pool:
            began = time.perf_counter()
            for _pixels in pool.map(decode_image, contents):
                pass
            rate("decoding alone", images, began)

    def looking_at_arrays(_: int) -> None:
        began = time.perf_counter()
        found = compute_profile(arrays)
        rate("arrays of 28 x 28", found.training.samples + found.test.samples, began)

    sides = {"photos": looking, "decoding alone": decoding, "arrays": looking_at_arrays}
    interleaved(options, result, sides, options.number(7))
    share = result.ratio("photos / decoding alone", "photos", "decoding alone")
    result.targets.append(Target("share of decoding alone", share, "%"))
    return result
