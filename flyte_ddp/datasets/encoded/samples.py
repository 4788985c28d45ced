"""Load the encoded images of shards or of single files as samples, decoded and cropped."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserCodeError, UserError
from flyte_ddp.core.loading.sample_loader import SampleLoader
from flyte_ddp.core.loading.split import TargetSpec
from flyte_ddp.core.loading.user_functions import (
    NO_AUGMENTATION,
    Augmentation,
    Sample,
    UserFunction,
)
from flyte_ddp.core.models.sidecar import EVALUATION_SHARE
from flyte_ddp.core.order.random_state import keep_random_state
from flyte_ddp.core.order.shard_order import SampleOrder
from flyte_ddp.core.samples.pictures import Pixels
from flyte_ddp.datasets.encoded import cropping
from flyte_ddp.datasets.encoded.decoding import DecodingError, decode_image
from flyte_ddp.datasets.encoded.readers import Encoded, ImageReader
from flyte_ddp.datasets.user_targets import derive_target_spec, require_target


@dataclass
class BadSamples:
    """Record of a rank's samples that cannot be decoded. Several threads may add samples."""

    allowed: int
    names: dict[str, str] = field(default_factory=dict)  # reason by name

    def add_sample(self, name: str, reason: str) -> None:
        """Record the sample ``name``, and the ``reason`` why it cannot be decoded. A known name counts once.

        Raises:
            UserError: More than ``allowed`` samples are recorded.
        """
        self.names[name] = reason
        if (count := len(self.names)) > self.allowed:
            more = f"; {count} samples cannot be decoded, more than bad_samples={self.allowed}" if self.allowed else ""
            raise UserError(f"{name} cannot be decoded: {reason}{more}; fix or remove the sample, or raise bad_samples")


def require_valid_label(encoded: Encoded, classes: int) -> int:
    """Return the label. Raises UserError unless the label is 0 to ``classes`` - 1."""
    if not 0 <= encoded.label < classes:
        rule = f"must be 0..{classes - 1} with {classes} classes; fix the label, or set num_classes"
        raise UserError(f"{encoded.name} has label {encoded.label}: {rule}")
    return encoded.label


@dataclass(eq=False)
class EncodedSamples(SampleLoader):
    """Samples of shards or files, as square colour images.

    A sample that cannot be decoded is replaced by another sample. Without user code, several threads may load samples.
    """

    reader: ImageReader
    orders: Sequence[SampleOrder]  # of the splits of the reader's samples; a sample is in one split only
    bad: BadSamples
    _: KW_ONLY
    size: int  # side of the squares, in pixels
    classes: int  # number of classes; labels must be smaller
    evaluation_crop_fraction: float = EVALUATION_SHARE  # of an image's shorter side that is in the middle square
    augmentation: Augmentation = NO_AUGMENTATION
    seed: int = 0  # of user-defined decoding
    decode: UserFunction | None = (
        None  # returns image and target of a sample's members; None: an image file and a class
    )
    trained_spec: TargetSpec | None = (
        None  # of the targets; None: with ``decode``, derived from the first sample at once
    )

    def __post_init__(self) -> None:
        """Set the remaining attributes. With ``decode`` and without ``trained_spec``, reads and decodes a sample."""
        self.sizes = ((self.size, self.size, 3),)
        self.replaced = set[int]()  # damaged samples
        self.reported = 0  # number of undecodable and replaced samples at the last take_report
        self.targets = self.trained_spec or self.find_target_spec()

    def find_target_spec(self) -> TargetSpec:
        """Return the properties of the targets. Without ``decode``, targets are class numbers.

        With ``decode``, reads and decodes the first sample of ``orders``. Restores the global random generators.
        """
        if self.decode is None:
            return TargetSpec(np.dtype(np.int64), (), self.classes)
        first = int(self.orders[0].samples_at(slice(0, 1))[0])
        with keep_random_state():
            image, target, name = self.load_image_or_substitute(first, self.reader.read_sample(first), None)
        where = f"sample {name!r}"
        _, target = self.fit_to_square(image, target, None, where)
        return derive_target_spec(self.decode, target, self.classes, where)

    def make_load_functions(self, samples: Sequence[int], epoch: int | None) -> list[Callable[[], Sample]]:
        """Start reading the samples. Return a function for each sample that decodes and crops the image.

        If ``epoch`` is the number of an epoch of training, the function also augments the sample.
        """
        draws: Iterable[Any] = itertools.repeat(None)
        if self.augmentation.kind == cropping.RESIZED_CROP and epoch is not None:
            draws = cropping.draw_crops(self.augmentation.seed, epoch, np.array(samples))
        reads = [self.reader.start_read(sample) for sample in samples]
        loads = zip(samples, reads, draws, strict=False)
        return [partial(self.load_read, sample, epoch, read, drawn) for sample, read, drawn in loads]

    def load_read(
        self, sample: int, epoch: int | None, read: Callable[[], Encoded], draws: NDArray[np.float64] | None
    ) -> Sample:
        """Wait for ``read()``, and return the decoded, augmented and cropped sample.

        ``draws`` are a sample's numbers from :func:`cropping.draw_crops` for a random crop, or None for the middle. If
        ``epoch`` is None, the user's augmentation is not called.
        """
        image, target, name = self.load_image_or_substitute(sample, read(), epoch)
        loaded, where = Sample(image, np.asarray(target), name), f"sample {name!r}"
        if self.decode is None and (self.augmentation.function is None or epoch is None):
            return loaded._replace(
                image=cropping.crop_to_square(image, self.size, draws, self.evaluation_crop_fraction)
            )
        loaded = self.augmentation.augment_sample(loaded, sample, epoch, where)
        image, target = self.fit_to_square(loaded.image, loaded.target, draws, where)
        own = self.augmentation.function or self.decode
        return Sample(image, require_target(own, target, self.targets, where), name)

    def load_image_or_substitute(self, sample: int, encoded: Encoded, epoch: int | None) -> tuple[Pixels, Any, str]:
        """Return pixels, target and key of a sample.

        For a damaged sample, returns the sample's key with pixels and target of the next good sample of the split.
        Records damaged samples in ``bad`` and ``replaced``. With ``decode``, seeds this process's generators and runs
        user code.

        Args:
            encoded: The sample as read.
            epoch: Epoch of training by which user code is seeded. None counts as 0.

        Raises:
            UserError: More samples are damaged than allowed, no substitute can be decoded, or a label is out of range.
            UserCodeError: The user's function fails, and no damaged sample is allowed.
        """
        if loaded := self.decode_or_record(sample, encoded, epoch):
            return *loaded, encoded.key
        self.replaced.add(sample)
        others = next(found for order in self.orders if sample in (found := order.list_substitutes(sample)))
        place = int(np.searchsorted(others, sample))  # list_substitutes() returns ascending numbers
        for other in [*others[place + 1 :].tolist(), *others[:place].tolist()]:
            if loaded := self.decode_or_record(other, self.reader.read_sample(other), epoch):
                return *loaded, encoded.key
        raise UserError(
            f"{encoded.name}: neither the sample nor any of its {len(others) - 1} substitutes can be decoded"
        )

    def decode_or_record(self, sample: int, encoded: Encoded, epoch: int | None) -> tuple[Pixels, Any] | None:
        """Return image and target of a sample, or None if the sample cannot be decoded.

        Records a sample that cannot be decoded in ``bad``. A recorded sample is not decoded again.

        Raises:
            UserError: More samples cannot be decoded than ``bad`` allows, or a label is out of range.
            UserCodeError: The user's function fails, and no damaged sample is allowed.
        """
        if encoded.name in self.bad.names:
            return None
        try:
            return self.decode_sample(sample, encoded, epoch or 0)
        except DecodingError as error:
            self.bad.add_sample(encoded.name, str(error))
            return None

    def decode_sample(self, sample: int, encoded: Encoded, epoch: int) -> tuple[Pixels, Any]:
        """Return image (of any size) and target of a sample.

        With ``decode``, seeds this process's generators and calls the user's function.

        Raises:
            DecodingError: The image cannot be decoded. If ``bad.allowed`` is not 0, also if the user's function fails.
            UserError: The label is out of range, or the user's function returns no image and target.
            UserCodeError: The user's function fails, and ``bad.allowed`` is 0.
        """
        own = self.decode
        if own is None:
            label = require_valid_label(encoded, self.classes)
            try:
                return decode_image(encoded.content), label
            except DecodingError as error:
                raise DecodingError(f"{error}{encoded.copy}") from None
        own.seed(self.seed, epoch, sample)
        try:
            image, target, _ = own.call(f"{encoded.name}{encoded.copy}", dict(encoded.members or {}))
        except UserCodeError as error:
            if self.bad.allowed:
                raise DecodingError(str(error)) from error
            raise
        return image, target

    def fit_to_square(
        self, image: Pixels, target: NDArray[Any], draws: NDArray[np.float64] | None, where: str
    ) -> tuple[Pixels, NDArray[Any]]:
        """Crop and resize an image of user code to a square with 3 channels. Return the square and the target.

        A target with the image's height and width is a mask, and is cropped with the image. If ``draws`` is None, the
        middle square is used, and an image of the final size is not cropped. ``where`` names the sample in errors.

        Raises:
            UserError: The image has neither 1 nor 3 channels.
        """
        if image.shape[2] == 1:
            image = image.repeat(3, axis=2)
        if image.shape[2] != 3:
            own = self.augmentation.function or self.decode
            raise UserError(f"{own} returned an image of {image.shape[2]} channels for {where}: must be 1 or 3")
        height, width, _ = image.shape
        if draws is not None:
            crop = cropping.random_crop(draws, height, width)
        elif height == width == self.size:
            return image, target
        else:
            crop = cropping.middle_crop(height, width, self.evaluation_crop_fraction)
        if target.ndim > 1 and target.shape[:2] == (height, width):
            target = cropping.resize_mask(target, crop, self.size)
        return cropping.resize_crop(image, crop, self.size), target

    def read_label(self, sample: int) -> int | None:
        """Return the class number of a sample, or None if user code makes the targets. Reads the sample."""
        return None if self.decode else require_valid_label(self.reader.read_sample(sample), self.classes)

    def take_report(self) -> tuple[dict[str, str], set[int]] | None:
        """Return the bad samples and the replaced samples, or None if nothing was added since the last call."""
        before, self.reported = self.reported, len(self.bad.names) + len(self.replaced)
        return None if self.reported == before else (dict(self.bad.names), set(self.replaced))

    def add_report(self, report: tuple[dict[str, str], set[int]]) -> None:
        """Add the bad and replaced samples that :meth:`take_report` returned in another process.

        Raises:
            UserError: More samples are bad than allowed.
        """
        names, replaced = report
        for name, reason in names.items():
            if name not in self.bad.names:
                self.bad.add_sample(name, reason)
        self.replaced |= replaced

    def bad_samples(self) -> frozenset[str]:
        return frozenset(self.bad.names)

    def replaced_samples(self) -> frozenset[int]:
        return frozenset(self.replaced)

    def close(self) -> None:
        self.reader.close()
