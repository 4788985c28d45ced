"""Load single images of a data set's items, from arrays or by the user's own code, and augment them."""

import numpy as np

from flyte_ddp.errors import UserError
from flyte_ddp.loading.own_items import Items
from flyte_ddp.loading.own_samples import OwnFunction, Sample, SampleLoader, augment_sample, convert_target
from flyte_ddp.loading.split import TargetSpec


class ItemImages(SampleLoader):
    """Images of one side, "train" or "test", of a data set, whose items are pairs of pixels and a target."""

    def __init__(
        self,
        items: Items,
        name: str,
        *,
        size: tuple[int, ...],
        targets: TargetSpec,
        seed: int,
        augment: OwnFunction | None = None,
        image_size: int = 0,
    ) -> None:
        """``name`` is for errors, ``size`` [H, W, C] that of all images as the data set has them.

        ``augment``, a user's own, may return images of that size, or of the hyperparameter ``image_size`` unless it
        is 0.
        """
        self.items, self.name, self.augment, self.seed, self.targets = items, name, augment, seed, targets
        self.sizes = (size, *([(image_size, image_size, size[2])] if image_size else ()))

    def load_sample(self, sample: int, epoch: int | None) -> Sample:
        """Return the sample, augmented for an ``epoch`` of training.

        Raises OwnCodeError or UserError, which name the sample, if the user's code fails or returns what does not fit.
        """
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
