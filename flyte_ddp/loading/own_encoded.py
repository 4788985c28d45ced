"""Load single samples of shards and image folders with a user's own decoding or augmentation."""

from collections import Counter
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.prepared import SampleOrder
from flyte_ddp.errors import UserError
from flyte_ddp.loading import cropping
from flyte_ddp.loading.decoding import DecodingError, Pixels
from flyte_ddp.loading.encoded import (
    BadSamples,
    Encoded,
    ImageReader,
    SubstitutingReader,
    decode_checked_sample,
    decode_with_or_refetch,
    name_decoder,
)
from flyte_ddp.loading.facts import Facts
from flyte_ddp.loading.own_samples import (
    OwnCodeError,
    OwnFunction,
    Sample,
    SampleLoader,
    augment_sample,
    convert_target,
    target_spec,
)
from flyte_ddp.loading.split import TargetSpec
from flyte_ddp.order.random_state import keep_random_state
from flyte_ddp.order.sampling import Indices, Order


@dataclass(eq=False)
class EncodedSamples(SubstitutingReader, SampleLoader):
    """Samples of shards or files, as squares in colour. Its fields are those of EncodedImages, with the user's code."""

    reader: ImageReader
    orders: Collection[SampleOrder]
    bad: BadSamples
    _: KW_ONLY
    decode: OwnFunction | None  # returns image and target of a sample's members; None: an image file and a class
    augment: OwnFunction | None  # changes training samples; None: the built-in augmentation ``crop`` does
    size: int
    share: float
    crop: str
    seed: int
    classes: int

    def __post_init__(self) -> None:
        self.sizes = ((self.size, self.size, 3),)
        self.targets = TargetSpec(np.dtype(np.int64), (), self.classes)
        self.prefetch_files = self.reader.prefetch_files if self.reader.fetches_files else None
        self.replaced = set()
        self.epoch = 0  # for which a sample is loaded, by which the draws of ``decode`` are seeded
        self.fetched = Counter[str]()  # by other processes, by the shards' addresses
        self.reported = self.count_found()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.reported = self.count_found()  # what the process that pickled this object has found is known there

    def count_found(self) -> tuple[int, int, Counter[str]]:
        return len(self.bad.names), len(self.replaced), Counter(self.reader.fetch_counts())

    def find_target_spec(self, order: Order) -> TargetSpec:
        """Return what all targets are, given the first sample of an order, which this process decodes."""
        assert self.decode is not None
        first = int(order.samples(slice(0, 1))[0])
        with keep_random_state():
            image, target, name = self.load_image_or_substitute(first, self.reader.read_sample(first))
        where = f"sample {name!r}"
        _, target = self.fit_to_square(image, target, first, None, where)
        return target_spec(self.decode, target, self.classes, where)

    def load_sample(self, sample: int, epoch: int | None) -> Sample:
        self.epoch = epoch or 0
        image, target, name = self.load_image_or_substitute(sample, self.reader.read_sample(sample))
        loaded, where = Sample(image, np.asarray(target), name), f"sample {name!r}"
        if self.augment is not None and epoch is not None:
            loaded = augment_sample(self.augment, loaded, (self.seed, epoch, sample), where)
        image, target = self.fit_to_square(loaded.image, loaded.target, sample, epoch, where)
        own = self.augment or self.decode
        assert own is not None
        return Sample(image, convert_target(own, target, self.targets, where), name)

    def decode_sample(self, sample: int, encoded: Encoded) -> tuple[Pixels, Any]:
        """Return image and target, the image of any size; read a sample that cannot be decoded once more.

        An exception of the user's function is a DecodingError if such samples are allowed, else an OwnCodeError.
        """
        own = self.decode
        if own is None:
            return decode_checked_sample(self.reader, sample, encoded, self.classes)

        def decode_members(read: Encoded) -> Sample:
            own.seed(self.seed, self.epoch, sample)
            try:
                return own.call(read.name, dict(read.members or {}))
            except OwnCodeError as error:
                raise DecodingError(str(error)) from error

        try:
            (image, target, _), _ = decode_with_or_refetch(decode_members, self.reader, sample, encoded)
        except DecodingError as error:
            if self.bad.allowed or error.__cause__ is None:
                raise
            raise error.__cause__ from error.__cause__.__cause__
        return image, target

    def fit_to_square(
        self, image: Pixels, target: NDArray[Any], sample: int, epoch: int | None, where: str
    ) -> tuple[Pixels, NDArray[Any]]:
        """Return the image as a square in colour, whole or a part, and a target of its size, cropped alike."""
        if image.shape[2] == 1:
            image = image.repeat(3, axis=2)
        if image.shape[2] != 3:
            own = self.augment or self.decode
            raise UserError(f"{own} returned an image of {image.shape[2]} channels for {where}: must be 1 or 3")
        height, width, _ = image.shape
        if self.crop == "resized_crop" and epoch is not None:
            crop = cropping.random_crop(cropping.draw_crops(self.seed, epoch, np.array([sample]))[0], height, width)
        elif height == width == self.size:
            return image, target
        else:
            crop = cropping.middle_crop(height, width, self.share)
        if target.ndim > 1 and target.shape[:2] == (height, width):
            target = cropping.resize_mask(target, crop, self.size)
        return cropping.resize_crop(image, crop, self.size), target

    def skip_read(self, samples: Indices) -> None:
        self.reader.skip_read(samples)

    def take_report(self) -> Any:
        """Return reasons by name of undecodable samples, replaced samples, and new fetches; None: nothing is new."""
        before, self.reported = self.reported, self.count_found()
        if self.reported == before:
            return None
        return dict(self.bad.names), set(self.replaced), self.reported[2] - before[2]

    def add_report(self, report: Any) -> None:
        names, replaced, fetched = report
        for name, reason in names.items():
            if name not in self.bad.names:
                self.bad.add_sample(name, reason)
        self.replaced |= replaced
        self.fetched.update(fetched)

    def facts(self) -> Facts:
        fetched = self.fetched + Counter(self.reader.fetch_counts())
        return Facts("" if self.decode else name_decoder(), frozenset(self.bad.names), fetched)

    def close(self) -> None:
        self.reader.close()
