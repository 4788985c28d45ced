"""Images that are decoded when they are needed, from shards or files, by threads that work ahead of training."""

from __future__ import annotations

import threading
from collections import deque
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
from flyte_ddp.loading.split import Images
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
    """Gives stored images, also to several threads. What a reader has no use for does nothing."""

    fetches = False  # see :class:`flyte_ddp.loading.split.Images`

    def read(self, sample: int) -> Encoded:
        """The image with that number."""
        raise NotImplementedError

    def begin(self, sample: int) -> Future[Encoded] | None:
        """Begins to read an image, if that takes long without being work."""

    def heal(self, sample: int) -> None:
        """Has our copy of the file that it is in replaced, if there is one and it is damaged."""

    def expect(self, samples: Indices) -> None:
        """Begins to fetch the files that these are in."""

    def fetched(self) -> Mapping[str, int]:
        """How often each file that is kept was fetched, by its address."""
        return {}

    def close(self) -> None:
        """Ends what was begun, and closes files."""


class BadSamples:
    """Counts samples that cannot be decoded, of which so many are allowed for each rank."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.names: dict[str, str] = {}  # with the reasons
        self.lock = threading.Lock()

    def add(self, name: str, reason: str) -> None:
        """Takes one more into account.

        Raises:
            UserError: it is one too many.
        """
        with self.lock:
            self.names[name] = reason
            count = len(self.names)
        if count > self.allowed:
            more = f"; {count} such samples, and bad_samples={self.allowed} are allowed" if self.allowed else ""
            raise UserError(
                f"{name} cannot be decoded: {reason}{more}; fix or remove it, or allow some with bad_samples"
            )


class Batch(NamedTuple):
    """A batch in the making: whole when all tasks are done."""

    images: Tensor
    labels: Tensor
    tasks: list[Future[None]]
    keys: dict[int, str]


@dataclass(eq=False)
class EncodedImages(Images):
    """Decodes, crops and, for training, augments images.

    Args:
        reader: where they are stored.
        size: side of the squares that they become, in pixels.
        crop: of training images: ``resized_crop`` (a random part, mirrored half of the time) or ``none`` (the middle).
        seed: of the random parts.
        classes: their number; a label must be below it.
        bad: takes samples into account that cannot be decoded; in the place of each is the next one that can.
        substitutes: the samples, ascending, one of which may replace a sample, which is among them.
        threads: that decode.
        device: where batches go.
    """

    reader: Reader
    _: KW_ONLY
    size: int
    crop: str
    seed: int
    classes: int
    bad: BadSamples
    substitutes: Callable[[int], Indices]
    threads: int
    device: torch.device
    batches_ahead = 2  # enough to keep the threads at work while a batch is waited for

    def __post_init__(self) -> None:
        self.fetches = self.reader.fetches
        self.replaced: set[int] = set()  # samples that others replaced
        self.keys: dict[int, str] = {}  # of the batch that was gathered last
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decoder", initializer=work_alone)
        self.pending: dict[tuple[int | None, bytes], Batch] = {}

    def names(self, samples: Indices) -> list[str]:
        """Of files, or of samples in their shards; of the batch that was gathered last."""
        return [self.keys[sample] for sample in samples.tolist()]

    def prefetch(self, samples: Indices, epoch: int | None) -> None:
        """Has threads begin with these samples."""
        key = (epoch, samples.tobytes())
        if key not in self.pending:
            self.pending[key] = self.begin(samples, epoch)

    def expect(self, samples: Indices) -> None:
        """Has files fetched that will be needed a while later."""
        self.reader.expect(samples)

    def gather(self, samples: Indices, epoch: int | None) -> tuple[Tensor, Tensor]:
        """Images uint8 [n, size, size, 3] and labels int64 [n] on the device."""
        batch = self.pending.pop((epoch, samples.tobytes()), None) or self.begin(samples, epoch)
        wait(batch.tasks, return_when=FIRST_EXCEPTION)  # once, and not for each: waking up takes time from the threads
        for task in batch.tasks:
            task.result()
        self.keys = batch.keys
        return batch.images.to(self.device, non_blocking=True), batch.labels.to(self.device, non_blocking=True)

    def begin(self, samples: Indices, epoch: int | None) -> Batch:
        """Hands the samples to the threads, a few at a time."""
        on_gpu = self.device.type == "cuda"
        images = torch.empty(len(samples), self.size, self.size, 3, dtype=torch.uint8, pin_memory=on_gpu)
        labels = torch.empty(len(samples), dtype=torch.int64, pin_memory=on_gpu)
        augmented = epoch is not None and self.crop == "resized_crop"
        draws = cropping.draw(self.seed, epoch or 0, samples) if augmented else None
        coming = [self.reader.begin(sample) for sample in samples.tolist()]
        pixels, classes, keys = images.numpy(), labels.numpy(), dict[int, str]()

        def load(places: range) -> None:
            for place in places:
                sample = int(samples[place])
                image, classes[place], keys[sample] = self.image(sample, coming[place])
                pixels[place] = cropping.squared(image, self.size, None if draws is None else draws[place])

        size = max(1, min(SAMPLES_A_TASK, len(samples) // (2 * self.threads)))  # so that no thread is without one
        starts = range(0, len(samples), size)
        tasks = [self.pool.submit(load, range(start, min(start + size, len(samples)))) for start in starts]
        return Batch(images, labels, tasks, keys)

    def image(self, sample: int, coming: Future[Encoded] | None) -> tuple[Pixels, int, str]:
        """A decoded image, its label and its key; in the place of one that is damaged, the next one of its split."""
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
        """The label of a sample, also of one that cannot be decoded."""
        return checked_label(self.reader.read(sample), self.classes)

    def decoded(self, sample: int, found: Encoded) -> tuple[Pixels, int] | None:
        """Pixels and label; None of a sample that is damaged where it comes from."""
        if found.name in self.bad.names:
            return None
        try:
            checked_label(found, self.classes)  # also of one that cannot be decoded
            pixels, whole = decoded(self.reader, sample, found)
            return pixels, checked_label(whole, self.classes)
        except DecodingError as error:
            self.bad.add(found.name, str(error))
            return None

    def facts(self) -> Facts:
        """Decoder, samples that cannot be decoded, and shards that were fetched."""
        return Facts(decoder_name(), frozenset(self.bad.names), dict(self.reader.fetched()))

    def close(self) -> None:
        """Ends the threads and closes files, without waiting for those that are in the middle of a download."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.reader.close()


def in_order(
    reader: Reader, samples: Indices, threads: int, use: Callable[[int, Encoded], Result], ahead: int
) -> Iterator[Result]:
    """What threads make of each sample, in the samples' order; at most ``ahead`` are read or in work at a time."""
    waiting: deque[Future[Result]] = deque()

    def used(sample: int, coming: Future[Encoded] | None) -> Result:
        return use(sample, coming.result() if coming is not None else reader.read(sample))

    pool = ThreadPoolExecutor(threads, thread_name_prefix="decoder", initializer=work_alone)
    try:
        for place, sample in enumerate(samples.tolist()):
            if place % ahead == 0:
                reader.expect(samples[place : place + 2 * ahead])
            waiting.append(pool.submit(used, sample, reader.begin(sample)))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def work_alone() -> None:
    """Keeps torch from starting threads for the work of this one."""
    torch.get_num_threads()  # torch sets the number for a thread when it is first asked in it
    threadpoolctl.threadpool_limits(1, user_api="openmp")


def decoded(reader: Reader, sample: int, found: Encoded) -> tuple[Pixels, Encoded]:
    """The pixels of a sample that was read, and the sample; if our copy of its file is damaged, another copy's.

    Raises:
        DecodingError: it is damaged where it comes from.
    """
    try:
        return decode(found.content), found
    except DecodingError:
        reader.heal(sample)
        again = reader.read(sample)
        if again.content == found.content:  # else it was healed now, or by another thread or rank
            raise
    return decode(again.content), again


def checked_label(found: Encoded, classes: int) -> int:
    """The label, which is a class's number.

    Raises:
        UserError: it is not.
    """
    if not 0 <= found.label < classes:
        raise UserError(
            f"{found.name} has label {found.label}: must be 0..{classes - 1} with {classes} classes; "
            "fix it, or set num_classes"
        )
    return found.label
