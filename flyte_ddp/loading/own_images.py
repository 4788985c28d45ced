"""Load single images of a data set's items, from arrays or by the user's own code, and augment them."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.loading.own_items import Items
from flyte_ddp.loading.own_samples import OwnFunction, Sample, SampleLoader, augment_sample, convert_target
from flyte_ddp.loading.split import TargetSpec


@dataclass(eq=False)
class ItemImages(SampleLoader):
    """Images of one side, "train" or "test", of a data set, whose items are pairs of pixels and a target."""

    items: Items
    name: str  # for errors
    _: KW_ONLY
    size: tuple[int, ...]  # [H, W, C] of all images as the data set has them
    targets: TargetSpec
    seed: int
    augment: OwnFunction | None = None  # may return images of ``size``, or of ``image_size`` unless that is 0
    image_size: int = 0

    def __post_init__(self) -> None:
        own = (self.image_size, self.image_size, self.size[2])
        self.sizes = (self.size, own) if self.image_size else (self.size,)

    def start_loads(self, samples: Sequence[int], epoch: int | None) -> list[Callable[[], Sample]]:
        return [partial(self.load_sample, sample, epoch) for sample in samples]

    def load_sample(self, sample: int, epoch: int | None) -> Sample:
        own, where = self.name, f"sample {sample}"
        image, target = self.items.read_item(sample, self.seed, epoch)
        loaded = Sample(image, np.asarray(target), "")
        if self.augment is not None and epoch is not None:
            own = str(self.augment)
            loaded = augment_sample(self.augment, loaded, (self.seed, epoch, sample), where)
        if loaded.image.shape not in self.sizes:
            sizes = " or ".join(str(list(size)) for size in self.sizes)
            raise UserError(
                f"{own} returned {list(loaded.image.shape)} as the image of {where}: must be {sizes}; give all "
                "images one size and one mode, such as by resize and convert('RGB')"
            )
        return Sample(loaded.image, convert_target(own, loaded.target, self.targets, where), "")
