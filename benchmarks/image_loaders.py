"""Image loaders to compare: this library's, the peers', and the minimum work of any loader.

All loaders read the same shards, and return the same images in batches of random crops of 224 x 224 pixels. Each loader
has two workers or threads. Peers are measured as in their documentation: Pillow or torchvision decodes, and the workers
crop, flip, convert and normalise each image. DALI's pipeline does all of this itself. All peers but DALI are measured
again with our decoder and torchvision's transforms on uint8. In this variant the library's function normalises the
batch.
"""

import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms import v2

from benchmarks import generated_images
from benchmarks.running import most_memory
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.launch.supervise.rank import configure_malloc
from flyte_ddp.core.loading.split import Split
from flyte_ddp.core.models.inputs import InputSpec, prepare_inputs
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.datasets.encoded import cropping
from flyte_ddp.datasets.encoded.decoding import decode_image
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware

SIZE, WORKERS = 224, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPEC = InputSpec(3, SIZE, SIZE, MEAN, STD)

Epoch = Callable[[int], Iterable[Tensor]]  # the batches of an epoch, by its number
Side = Callable[[dict[str, Any], Path], Epoch]  # takes what is to be loaded, and a folder of its own


class AsDocumented:
    """Converts an image of Pillow, or a tensor, to a normalised float tensor."""

    def __init__(self) -> None:
        steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip()]
        self.of_pillow = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
        self.of_tensors = v2.Compose(
            [
                v2.RandomResizedCrop(SIZE, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __call__(self, image: Any) -> Tensor:
        result: Tensor = self.of_tensors(image) if isinstance(image, Tensor) else self.of_pillow(image)
        return result


class Fast:
    """Converts a stored image to a uint8 tensor."""

    def __init__(self) -> None:
        self.crop = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])

    def __call__(self, stored: bytes | memoryview) -> Tensor:
        result: Tensor = self.crop(torch.from_numpy(decode_image(bytes(stored))).permute(2, 0, 1))
        return result


def normalised(batches: Iterable[Any]) -> Iterator[Tensor]:
    """Batches of uint8 images [n, 3, SIZE, SIZE] and labels as a model's input."""
    for images, _ in batches:
        yield prepare_inputs(images.permute(0, 2, 3, 1), SPEC)


def images_of(batches: Iterable[Any]) -> Iterator[Tensor]:
    for images, _ in batches:
        yield images


def ours(order: dict[str, Any], folder: Path, *, normalise: bool = True) -> Epoch:
    """The library's training split, in a process that keeps its memory as a rank does."""
    configure_malloc(retain=True)
    hp = Hyperparameters(
        dataset=order["dataset"],
        test_dataset=order["test_dataset"],
        augment="resized_crop",
        batch_size=order["batch_size"],
        validation_fraction=0.0,
        num_ranks=1,
        shuffle_shards=4,
    )
    prepared = fetch(hp.dataset, "", folder / "prepared", test_dataset=hp.test_dataset, progress="off")
    settings = Settings(progress="off", cache_folder=folder / "cache", loaders=WORKERS)
    splits = OpenedData(hp, open_prepared(prepared)).open_splits(detect_hardware(hp), torch.device("cpu"), settings)
    training: Split = splits.training

    def epoch(number: int) -> Iterator[Tensor]:
        batches = training.order.batches(number, hp.batch_size)
        for samples in training.iterate_with_prefetch(batches, lambda batch: [batch], number, hp.batch_size):
            images = training.load_batch(samples, number).inputs
            yield prepare_inputs(images, SPEC) if normalise else images

    return epoch


def ours_uint8(order: dict[str, Any], folder: Path) -> Epoch:
    """Load batches like ``ours`` before normalisation, which is a part of the training step."""
    return ours(order, folder, normalise=False)


def webdataset(order: dict[str, Any], _: Path, *, fast: bool = False) -> Epoch:
    import webdataset as wds

    samples = wds.WebDataset(shard_paths(order), shardshuffle=100).shuffle(1000)
    if fast:
        samples = samples.to_tuple("jpg", "cls").map_tuple(Fast(), int)
    else:
        samples = samples.decode("pil").to_tuple("jpg", "cls").map_tuple(AsDocumented(), int)
    batches = samples.batched(order["batch_size"])
    loader = wds.WebLoader(batches, batch_size=None, num_workers=WORKERS, persistent_workers=True)
    return lambda _: normalised(loader) if fast else images_of(loader)


def wids(order: dict[str, Any], folder: Path, *, fast: bool = False) -> Epoch:
    import wids as library

    index = order["dataset"].partition(":")[2]
    data = library.ShardListDataset(
        index, cache_dir=str(folder / "wids"), keep=True, transformations=[] if fast else "PIL"
    )
    transform = Fast() if fast else AsDocumented()

    def pair(sample: dict[str, Any]) -> tuple[Tensor, int]:
        image, label = sample[".jpg"], sample[".cls"]
        return (transform(image.read()), int(label.read())) if fast else (transform(image), int(label))

    data.add_transform(pair)
    sampler = library.DistributedChunkedSampler(data, chunksize=1000, shuffle=True)
    loader = DataLoader(
        data, batch_size=order["batch_size"], sampler=sampler, num_workers=WORKERS, persistent_workers=True
    )
    return lambda _: normalised(loader) if fast else images_of(loader)


def litdata(order: dict[str, Any], _: Path, *, fast: bool = False) -> Epoch:
    from litdata import StreamingDataLoader, StreamingDataset

    transform = Fast() if fast else AsDocumented()

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            sample = super().__getitem__(index)
            return transform(sample["image"]), sample["class"]

    data = Images(order["chunks"]["bytes" if fast else "images"], shuffle=True)
    loader = StreamingDataLoader(data, batch_size=order["batch_size"], num_workers=WORKERS, persistent_workers=True)
    return lambda _: normalised(loader) if fast else images_of(loader)


def dali(order: dict[str, Any], _: Path) -> Epoch:
    """The pipeline of its ImageNet example on a CPU: decodes the part that a crop needs."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    paths = shard_paths(order)

    @pipeline_def(batch_size=order["batch_size"], num_threads=WORKERS, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        members: Any = fn.readers.webdataset(paths=paths, ext=["jpg", "cls"], random_shuffle=True, name="shards")
        stored, label = members
        parts = fn.decoders.image_random_crop(
            stored, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3], output_type=types.RGB
        )
        squares = fn.resize(parts, size=[SIZE, SIZE])
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        mirror = fn.random.coin_flip()
        images = fn.crop_mirror_normalize(squares, mean=mean, std=std, mirror=mirror, output_layout="CHW")
        return images, label

    partial = LastBatchPolicy.PARTIAL
    batches = DALIGenericIterator(
        pipeline(), ["images", "labels"], reader_name="shards", last_batch_policy=partial, auto_reset=True
    )
    return lambda _: (found["images"] for [found] in batches)


def shard_paths(order: dict[str, Any]) -> list[str]:
    index = Path(order["dataset"].partition(":")[2])
    return [str(index.parent / shard["url"]) for shard in json.loads(index.read_text())["shardlist"]]


def write_chunks(folder: Path, images: int) -> dict[str, str]:
    """Write the images in LitData's format, and return both folders.

    The folder ``images`` has images that LitData decodes itself, and the folder ``bytes`` has bytes.
    """
    from litdata import Jpeg, optimize

    found = {}
    for kind, wrap in (("images", lambda stored: Jpeg(bytes=stored)), ("bytes", bytes)):
        found[kind] = str(folder / kind)

        def sample(number: int, wrap: Callable[[bytes], Any] = wrap) -> dict[str, Any]:
            return {"image": wrap(generated_images.content(number)), "class": generated_images.label(number)}

        optimize(sample, list(range(images)), found[kind], chunk_bytes="64MB", num_workers=1, start_method="fork")
    return found


def decode_and_crop(numbers: Sequence[int]) -> int:
    """Decode and crop images from memory, the minimum work of a loader. Return the number of images."""
    for number, draws in zip(numbers, cropping.draw_crops(0, 0, np.arange(len(numbers))), strict=True):
        pixels = decode_image(generated_images.content(number))
        height, width, _ = pixels.shape
        cropping.resize_crop(pixels, cropping.random_crop(draws, height, width), SIZE)
    return len(numbers)


def bare_threads(order: dict[str, Any], _: Path) -> Epoch:
    return in_workers(ThreadPoolExecutor(WORKERS), WORKERS, range(order["images"]))


def bare_processes(order: dict[str, Any], _: Path) -> Epoch:
    """Decode and crop alone, in processes.

    The order may set the number of processes (``workers``) and of distinct images (``different``).
    """
    workers, different = order.get("workers", WORKERS), order.get("different", order["images"])
    numbers = [number % different for number in range(order["images"])]
    return in_workers(ProcessPoolExecutor(workers, multiprocessing.get_context("fork")), workers, numbers)


def in_workers(pool: Executor, workers: int, images: Sequence[int]) -> Epoch:
    """Decode and crop in workers, each with a part of the images. Processes inherit the images by fork."""
    configure_malloc(retain=True)
    parts = [images[start::workers] for start in range(workers)]
    [generated_images.content(number) for part in parts for number in part]

    def epoch(_: int) -> Iterator[Tensor]:
        for count in pool.map(decode_and_crop, parts):
            yield torch.empty(count)

    return epoch


def fast(side: Callable[..., Epoch]) -> Side:
    return lambda order, folder: side(order, folder, fast=True)


SIDES: dict[str, Side] = {
    "ours": ours,
    "webdataset as documented": webdataset,
    "wids as documented": wids,
    "litdata as documented": litdata,
    "dali as documented": dali,
    "webdataset, our decoder": fast(webdataset),
    "wids, our decoder": fast(wids),
    "litdata, our decoder": fast(litdata),
    "ours, uint8": ours_uint8,
    "decode and crop alone, threads": bare_threads,
    "decode and crop alone, processes": bare_processes,
}


def measure_loader(order: dict[str, Any]) -> dict[str, float]:
    """Return the images/s of the last epoch, the number of images, and the peak memory in bytes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # the cores are for the two workers or threads that are compared
    with tempfile.TemporaryDirectory(prefix="flyte-ddp-bench-") as folder:
        epoch = SIDES[order["side"]](order, Path(folder))
        for number in range(order["epochs"]):
            begin, count = time.perf_counter(), 0
            for images in epoch(number):
                count += len(images)
            seconds = time.perf_counter() - begin
        return {"rate": count / seconds, "images": count, "memory": most_memory()}
