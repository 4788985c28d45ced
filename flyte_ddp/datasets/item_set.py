"""Prepared sets of items. Inputs and targets are any leaves, or images of one size."""

from flyte_ddp.catalog import OF_CLASSES
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.datasets.prepared_set import PreparedSet


class ItemSet(PreparedSet):
    """Base class of the sets whose samples are items."""

    opening = "flyte_ddp.datasets.item_splits"
    mean: tuple[float, ...] = ()  # of each channel of the training images, scaled to 0..1; empty: not known
    std: tuple[float, ...] = ()

    def read_item(self, side: str, sample: int, seed: int, epoch: int | None) -> tuple[Leaves, Leaves]:
        """Return inputs and targets of an item. Images are uint8 [H, W, C]."""
        raise NotImplementedError

    def needs_classes(self, hp: Hyperparameters) -> bool:
        targets = self.training_targets()
        return hp.objective in OF_CLASSES and (targets is None or targets.dtype.kind != "f")

    def check_settings(self, hp: Hyperparameters) -> None:
        if hp.bad_samples:
            what = f"dataset={self.name!r} reads its samples itself"
            raise UserError(
                f"bad_samples={hp.bad_samples}: {what}; set bad_samples=0, and skip unreadable samples there"
            )
        super().check_settings(hp)
