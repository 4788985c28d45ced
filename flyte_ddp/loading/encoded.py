"""Images that are decoded when they are needed, from shards or files, by threads that work ahead of training."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import threadpoolctl
import torch
from torch import Tensor

from flyte_ddp.errors import UserError
from flyte_ddp.loading import cropping
from flyte_ddp.loading.decoding import DecodingError, Pixels, decode, decoder_name
from flyte_ddp.loading.facts import Facts
from flyte_ddp.loading.split import Batch, Images
from flyte_ddp.lookahead import map_in_threads
from flyte_ddp.order.sampling import Indices

SAMPLES_A_TASK = 8  # at most: it makes little of a task's own cost
Result = TypeVar("Result")


@dataclass(frozen=True)
class Encoded:
    """An image as it is stored, its label, what to call it in a sentence, and what it is called where it is."""

    content: bytes
    label: int
    name: str
    key: str = ""


class Reader:
    """Base class of thread-safe readers of stored images. Optional hooks default to no-ops."""

    fetches = False  # see :class:`flyte_ddp.loading.split.Images`

    def read(self, sample: int) -> Encoded:
        """Return the image with that number."""
        raise NotImplementedError

    def begin(self, sample: int) -> Future[Encoded] | None:
        """Begin to read an image, if that takes long without being work."""

    def heal(self, sample: int) -> None:
        """Replace our copy of the sample's file, if there is one and it is damaged."""

    def expect(self, samples: Indices) -> None:
        """Begin to fetch the files of these samples."""

    def fetched(self) -> Mapping[str, int]:
        """Return how often each file that is kept was fetched, by its address."""
        return {}

    def close(self) -> None:
        """End what was begun, and close files."""


class BadSamples:
    """Counts samples that cannot be decoded, of which so many are allowed for each rank."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.names: dict[str, str] = {}  # with the reasons
        self.lock = threading.Lock()

    def add(self, name: str, reason: str) -> None:
        """Count a sample, once by its name, or raise a UserError if it is one too many."""
        with self.lock:
            self.names[name] = reason
            count = len(self.names)
        if count > self.allowed:
            more = f"; {count} such samples, and bad_samples={self.allowed} are allowed" if self.allowed else ""
            raise UserError(
                f"{name} cannot be decoded: {reason}{more}; fix or remove it, or allow some with bad_samples"
            )


class Loading(NamedTuple):
    """A batch in the making, on the CPU: whole when all tasks are done."""

    images: Tensor
    labels: Tensor
    names: list[str]
    tasks: list[Future[None]]


@dataclass(eq=False)
class EncodedImages(Images):
    """Decodes, crops and, for training, augments images."""

    reader: Reader
    _: KW_ONLY
    size: int  # side of the squares that images become, in pixels
    crop: str  # of training images: ``resized_crop`` (a random part, half of them mirrored) or ``none`` (the middle)
    seed: int  # of the random parts
    classes: int  # their number, which labels must be below
    bad: BadSamples
    substitutes: Callable[[int], Indices]  # ascending samples of which one may replace a sample
    threads: int
    device: torch.device
    batches_ahead = 2  # enough to keep the threads at work while a batch is waited for

    def __post_init__(self) -> None:
        self.fetches = self.reader.fetches
        self.replaced: set[int] = set()  # samples that others replaced
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decoder", initializer=limit_threads)
        self.pending: dict[tuple[int | None, bytes], Loading] = {}

    def prefetch(self, samples: Indices, epoch: int | None) -> None:
        """Begin to load these samples in the threads."""
        key = (epoch, samples.tobytes())
        if key not in self.pending:
            self.pending[key] = self.begin(samples, epoch)

    def expect(self, samples: Indices) -> None:
        """Begin to fetch the files of these samples."""
        self.reader.expect(samples)

    def gather(self, samples: Indices, epoch: int | None) -> Batch:
        """Return images uint8 [n, size, size, 3] and labels int64 [n] on the device."""
        loading = self.pending.pop((epoch, samples.tobytes()), None) or self.begin(samples, epoch)
        wait(loading.tasks, return_when=FIRST_EXCEPTION)  # once, not for each: waking up takes time from the threads
        for task in loading.tasks:
            task.result()
        images, labels = (values.to(self.device, non_blocking=True) for values in (loading.images, loading.labels))
        return Batch(images, labels, loading.names)

    def begin(self, samples: Indices, epoch: int | None) -> Loading:
        """Hand the samples to the threads, a few at a time."""
        on_gpu = self.device.type == "cuda"
        images = torch.empty(len(samples), self.size, self.size, 3, dtype=torch.uint8, pin_memory=on_gpu)
        labels = torch.empty(len(samples), dtype=torch.int64, pin_memory=on_gpu)
        augmented = epoch is not None and self.crop == "resized_crop"
        draws = cropping.draw(self.seed, epoch or 0, samples) if augmented else None
        coming = [self.reader.begin(sample) for sample in samples.tolist()]
        pixels, classes, names = images.numpy(), labels.numpy(), [""] * len(samples)

        def load(places: range) -> None:
            for place in places:
                image, classes[place], names[place] = self.image(int(samples[place]), coming[place])
                pixels[place] = cropping.squared(image, self.size, None if draws is None else draws[place])

        size = max(1, min(SAMPLES_A_TASK, len(samples) // (2 * self.threads)))  # so that no thread is without one
        starts = range(0, len(samples), size)
        tasks = [self.pool.submit(load, range(start, min(start + size, len(samples)))) for start in starts]
        return Loading(images, labels, names, tasks)

    def image(self, sample: int, coming: Future[Encoded] | None) -> tuple[Pixels, int, str]:
        """Return a decoded image, its label and its key; in the place of a damaged one, the next one of its split."""
        found = coming.result() if coming is not None else self.reader.read(sample)
        if loaded := self.decoded(sample, found):
            return *loaded, found.key
        self.replaced.add(sample)
        others = self.substitutes(sample)
        place = int(np.searchsorted(others, sample))
        for other in [*others[place + 1 :].tolist(), *others[:place].tolist()]:
            if loaded := self.decoded(other, self.reader.read(other)):
                return *loaded, found.key
        raise UserError(f"{found.name}: neither this nor any of its {len(others) - 1} substitutes can be decoded")

    def label(self, sample: int) -> int:
        """Return the label of a sample, also of one that cannot be decoded."""
        return checked_label(self.reader.read(sample), self.classes)

    def decoded(self, sample: int, found: Encoded) -> tuple[Pixels, int] | None:
        """Return pixels and label of a sample; None if it is damaged where it comes from, and counted as such."""
        if found.name in self.bad.names:
            return None
        try:
            return decode_and_check(self.reader, sample, found, self.classes)
        except DecodingError as error:
            self.bad.add(found.name, str(error))
            return None

    def facts(self) -> Facts:
        """Return decoder, samples that cannot be decoded, and shards that were fetched."""
        return Facts(decoder_name(), frozenset(self.bad.names), dict(self.reader.fetched()))

    def close(self) -> None:
        """End the threads and close files, without waiting for threads that are in the middle of a download."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.reader.close()


def in_order(
    reader: Reader, samples: Indices, threads: int, use: Callable[[int, Encoded], Result], ahead: int
) -> Iterator[Result]:
    """Yield what threads make of each sample, in their order; at most ``ahead`` are read or in work at a time."""

    def begin() -> Iterator[tuple[int, Future[Encoded] | None]]:
        for place, sample in enumerate(samples.tolist()):
            if place % ahead == 0:
                reader.expect(samples[place : place + 2 * ahead])
            yield sample, reader.begin(sample)

    def use_read(item: tuple[int, Future[Encoded] | None]) -> Result:
        sample, coming = item
        return use(sample, coming.result() if coming is not None else reader.read(sample))

    with map_in_threads(use_read, begin(), threads, ahead=ahead - 1, initializer=limit_threads) as results:
        yield from results


def limit_threads() -> None:
    """Keep torch from starting threads for the work of this one."""
    torch.get_num_threads()  # torch sets the number for a thread when it is first asked in it
    threadpoolctl.threadpool_limits(1, user_api="openmp")


def decoded(reader: Reader, sample: int, found: Encoded) -> tuple[Pixels, Encoded]:
    """Return the pixels of a sample that was read, and the sample; if our copy of its file is damaged, another copy's.

    Raises a DecodingError if the sample is damaged where it comes from.
    """
    try:
        return decode(found.content), found
    except DecodingError:
        reader.heal(sample)
        again = reader.read(sample)
        if again.content == found.content:  # else it was healed now, or by another thread or rank
            raise
    return decode(again.content), again


def decode_and_check(reader: Reader, sample: int, found: Encoded, classes: int) -> tuple[Pixels, int]:
    """Return pixels and label of :func:`decoded`; raise a UserError for a wrong label, also if it cannot be decoded."""
    checked_label(found, classes)
    pixels, whole = decoded(reader, sample, found)
    return pixels, checked_label(whole, classes)


def checked_label(found: Encoded, classes: int) -> int:
    """Return the label, or raise a UserError if it is not a class's number."""
    if not 0 <= found.label < classes:
        raise UserError(
            f"{found.name} has label {found.label}: must be 0..{classes - 1} with {classes} classes; "
            "fix it, or set num_classes"
        )
    return found.label
