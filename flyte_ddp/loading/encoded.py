"""Load encoded images from shards or files, decoded by threads that work ahead of training."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import threadpoolctl
import torch

from flyte_ddp.datasets.prepared import SampleOrder
from flyte_ddp.errors import UserError
from flyte_ddp.loading import cropping
from flyte_ddp.loading.decoding import DecodingError, Pixels, choose_decoder, decode_image, decode_with_torchcodec
from flyte_ddp.loading.facts import Facts
from flyte_ddp.loading.split import Batch, BatchSource
from flyte_ddp.lookahead import map_in_threads
from flyte_ddp.models.images import EVALUATION_SHARE
from flyte_ddp.order.sampling import Indices

SAMPLES_A_TASK = 8  # at most; enough to make the cost of a task itself small
Result = TypeVar("Result")


@dataclass(frozen=True)
class Encoded:
    """An image file's content, with label and names."""

    content: bytes
    label: int
    name: str  # for errors, such as "image s3://bucket/cat/1.jpg"
    key: str = ""  # the name within the data set
    # For users' own decoding, in place of content and label: the members by their extensions, and ``__key__``.
    members: Mapping[str, Any] | None = None


class ImageReader:
    """Base class of thread-safe readers of encoded images. Optional hooks default to no-ops."""

    fetches_files = False  # True if whole files are fetched, so that prefetch_files() is useful

    def read_sample(self, sample: int) -> Encoded:
        """Read one sample, and return its encoded image with its label."""
        raise NotImplementedError

    def start_read(self, sample: int) -> Callable[[], Encoded]:
        """Return a function that returns the sample. A slow reader starts the read at once, in another thread."""
        return partial(self.read_sample, sample)

    def refetch_if_damaged(self, sample: int) -> None:
        """Check the cached copy of the sample's file; if it is damaged, make the next read fetch the file again."""

    def prefetch_files(self, samples: Indices) -> None:
        """Start to fetch the files that hold these samples."""

    def skip_read(self, samples: Indices) -> None:
        """Note that another process has read these samples: files behind theirs may be fetched."""

    def fetch_counts(self) -> Mapping[str, int]:
        """Return how often each cached file was fetched, by its address."""
        return {}

    def close(self) -> None:
        """Cancel what was started, and close files."""


@dataclass
class BadSamples:
    """Thread-safe record of a rank's samples that cannot be decoded."""

    allowed: int
    names: dict[str, str] = field(default_factory=dict)  # reason by name
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return BadSamples, (self.allowed, dict(self.names))

    def add_sample(self, name: str, reason: str) -> None:
        """Record a sample that cannot be decoded; raise a UserError if more than ``allowed`` names are recorded."""
        with self.lock:
            self.names[name] = reason
            count = len(self.names)
        if count > self.allowed:
            more = f"; there are {count} such samples, more than bad_samples={self.allowed}" if self.allowed else ""
            raise UserError(f"{name} cannot be decoded: {reason}{more}; fix or remove it, or raise bad_samples")


class SubstitutingReader:
    """Base class of what decodes samples, and takes another sample in place of one that cannot be decoded."""

    reader: ImageReader
    orders: Collection[SampleOrder]  # of the splits that the reader's samples make up, without common samples
    bad: BadSamples
    replaced: set[int]  # damaged samples, each replaced by another sample

    def decode_sample(self, sample: int, encoded: Encoded) -> tuple[Pixels, Any]:
        """Decode a sample that was read as ``encoded``; return pixels and target. Raises a DecodingError."""
        raise NotImplementedError

    def load_image_or_substitute(self, sample: int, encoded: Encoded) -> tuple[Pixels, Any, str]:
        """Return pixels, target and key of a sample; for a damaged one, pixels and target of another of its split.

        The other is the next (with shards: in the same shard) that can be decoded. Adds damaged samples to ``bad``, and
        ``sample`` to ``replaced``. Raises a UserError if there are too many, or no other sample can be decoded.
        """
        if loaded := self.decode_or_record(sample, encoded):
            return *loaded, encoded.key
        self.replaced.add(sample)
        for order in self.orders:
            others = order.substitutes(sample)  # ascending
            place = int(np.searchsorted(others, sample))
            if place < len(others) and others[place] == sample:
                break  # this is the sample's split
        else:
            raise IndexError(f"sample {sample} is in no split")
        for other in [*others[place + 1 :].tolist(), *others[:place].tolist()]:
            if loaded := self.decode_or_record(other, self.reader.read_sample(other)):
                return *loaded, encoded.key
        raise UserError(f"{encoded.name}: neither this nor any of its {len(others) - 1} substitutes can be decoded")

    def decode_or_record(self, sample: int, encoded: Encoded) -> tuple[Pixels, Any] | None:
        """Return pixels and target of a sample, or None for a damaged one, which is recorded in ``bad``."""
        if encoded.name in self.bad.names:
            return None
        try:
            return self.decode_sample(sample, encoded)
        except DecodingError as error:
            self.bad.add_sample(encoded.name, str(error))
            return None


@dataclass(eq=False)
class EncodedImages(SubstitutingReader, BatchSource):
    """Source of encoded images: decodes, crops and, for training, augments them in threads."""

    reader: ImageReader
    _: KW_ONLY
    orders: Collection[SampleOrder]
    size: int  # side of the squares that images become, in pixels
    share: float = EVALUATION_SHARE  # of an image's shorter side that is in the middle square
    crop: str = "none"  # for training: resized_crop (a random part, mirrored half of the time) or none (the middle)
    seed: int = 0  # of the random parts
    classes: int  # number of classes; labels must be smaller
    bad: BadSamples
    threads: int  # that decode
    device: torch.device
    batches_ahead = 2  # enough to keep the threads busy while load_batch() waits for a batch

    def __post_init__(self) -> None:
        self.prefetch_files = self.reader.prefetch_files if self.reader.fetches_files else None
        self.replaced = set()
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decoder", initializer=limit_threads)
        # Batches in CPU memory that threads are filling, with the tasks of the threads, by epoch and samples.
        self.pending: dict[tuple[int | None, bytes], tuple[Batch, list[Future[None]]]] = {}

    def prefetch_batch(self, samples: Indices, epoch: int | None) -> None:
        key = (epoch, samples.tobytes())
        if key not in self.pending:
            self.pending[key] = self.submit_batch(samples, epoch)

    def load_batch(self, samples: Indices, epoch: int | None) -> Batch:
        """Return images uint8 [n, size, size, 3] and labels int64 [n] on the device, and the samples' names.

        A sample that cannot be decoded gets the image and label of another, but keeps its name. Waits for the threads
        without a timeout, and raises the first exception of one.
        """
        self.prefetch_batch(samples, epoch)
        batch, tasks = self.pending.pop((epoch, samples.tobytes()))
        wait(tasks, return_when=FIRST_EXCEPTION)  # one wait for all: each wake-up takes time from the threads
        for task in tasks:
            task.result()
        images, labels = (values.to(self.device, non_blocking=True) for values in batch[:2])
        return Batch(images, labels, batch.names)

    def submit_batch(self, samples: Indices, epoch: int | None) -> tuple[Batch, list[Future[None]]]:
        """Return a batch in CPU memory (page-locked for a GPU), and the tasks that fill it, up to 8 samples each."""
        on_gpu = self.device.type == "cuda"
        images = torch.empty(len(samples), self.size, self.size, 3, dtype=torch.uint8, pin_memory=on_gpu)
        labels = torch.empty(len(samples), dtype=torch.int64, pin_memory=on_gpu)
        augmented = epoch is not None and self.crop == "resized_crop"
        draws = cropping.draw_crops(self.seed, epoch or 0, samples) if augmented else None
        reads = [self.reader.start_read(sample) for sample in samples.tolist()]
        pixels, classes, names = images.numpy(), labels.numpy(), [""] * len(samples)

        def load_places(places: range) -> None:
            for place in places:
                image, classes[place], names[place] = self.load_image_or_substitute(int(samples[place]), reads[place]())
                own_draws = None if draws is None else draws[place]
                pixels[place] = cropping.crop_to_square(image, self.size, own_draws, self.share)

        size = max(1, min(SAMPLES_A_TASK, len(samples) // (2 * self.threads)))  # at least two tasks a thread
        starts = range(0, len(samples), size)
        tasks = [self.pool.submit(load_places, range(start, min(start + size, len(samples)))) for start in starts]
        return Batch(images, labels, names), tasks

    def decode_sample(self, sample: int, encoded: Encoded) -> tuple[Pixels, int]:
        return decode_checked_sample(self.reader, sample, encoded, self.classes)

    def read_label(self, sample: int) -> int:
        """Read and return a sample's label, also of a damaged image; UserError if it is outside 0..classes-1."""
        return require_valid_label(self.reader.read_sample(sample), self.classes)

    def facts(self) -> Facts:
        return Facts(name_decoder(), frozenset(self.bad.names), dict(self.reader.fetch_counts()))

    def close(self) -> None:
        """Stop the threads and close files. Does not wait for threads that are downloading."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.reader.close()


def name_decoder() -> str:
    return "torchcodec" if choose_decoder() is decode_with_torchcodec else "Pillow"


def map_samples(
    reader: ImageReader, samples: Indices, threads: int, use: Callable[[int, Encoded], Result], ahead: int
) -> Iterator[Result]:
    """Read samples, call ``use`` in threads with each sample's number and encoded image; yield the results in order.

    At most ``ahead`` samples are read or in use at a time; the files of up to ``2 * ahead`` are being fetched.
    """

    def start_reads() -> Iterator[tuple[int, Callable[[], Encoded]]]:
        for place, sample in enumerate(samples.tolist()):
            if place % ahead == 0:
                reader.prefetch_files(samples[place : place + 2 * ahead])
            yield sample, reader.start_read(sample)

    with map_in_threads(
        lambda item: use(item[0], item[1]()), start_reads(), threads, ahead=ahead - 1, initializer=limit_threads
    ) as results:
        yield from results


def limit_threads() -> None:
    """Make torch and OpenMP use one thread for work of the calling thread, until the thread ends."""
    torch.get_num_threads()  # torch's first call in a thread sets its number of threads, so the limit comes after it
    threadpoolctl.threadpool_limits(1, user_api="openmp")


def decode_or_refetch(reader: ImageReader, sample: int, encoded: Encoded) -> tuple[Pixels, Encoded]:
    """Return a sample's pixels, and the sample whose bytes were decoded: read again if it was damaged."""
    return decode_with_or_refetch(lambda read: decode_image(read.content), reader, sample, encoded)


def decode_with_or_refetch(
    decode: Callable[[Encoded], Result], reader: ImageReader, sample: int, encoded: Encoded
) -> tuple[Result, Encoded]:
    """Return what ``decode`` makes of a sample, and the sample as it was read last.

    After a DecodingError removes the file's cached copy if it is damaged, and reads and decodes the sample once more.
    """
    try:
        return decode(encoded), encoded
    except DecodingError:
        reader.refetch_if_damaged(sample)
        again = reader.read_sample(sample)
        if again == encoded:
            raise  # the file was not replaced, by this call or by another thread or rank, so its source is damaged
    return decode(again), again


def decode_checked_sample(reader: ImageReader, sample: int, encoded: Encoded, classes: int) -> tuple[Pixels, int]:
    """Return a sample's pixels and label; DecodingError if damaged, UserError for a label outside 0..classes-1."""
    require_valid_label(encoded, classes)
    pixels, whole = decode_or_refetch(reader, sample, encoded)
    return pixels, require_valid_label(whole, classes)


def require_valid_label(encoded: Encoded, classes: int) -> int:
    if not 0 <= encoded.label < classes:
        raise UserError(
            f"{encoded.name} has label {encoded.label}: must be 0..{classes - 1} with {classes} classes; "
            "fix it, or set num_classes"
        )
    return encoded.label
