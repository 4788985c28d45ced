"""Prepared sets of items. Inputs and targets are any leaves, or images of one size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flyte_ddp.catalog import OF_CLASSES
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.datasets.prepared_set import Opening, PreparedSet

if TYPE_CHECKING:
    import torch

    from flyte_ddp.core.loading.split import Split, Splits
    from flyte_ddp.core.models.inputs import ModelInput
    from flyte_ddp.core.order.shard_order import Orders
    from flyte_ddp.core.samples.pictures import Pixels
    from flyte_ddp.core.settings import Settings


class ItemSet(PreparedSet):
    """Base class of the sets whose samples are items."""

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

    def open_splits(self, orders: Orders, hp: Hyperparameters, device: torch.device, settings: Settings) -> Splits:
        """Open this rank's splits. Arrays need processes only if augmentation or collate are user-defined."""
        from flyte_ddp.datasets import item_splits

        return item_splits.open_item_splits(self, orders, hp, device, settings.loaders)

    def open_test_split(self, opening: Opening) -> tuple[Split, ModelInput]:
        from flyte_ddp.datasets import item_splits

        return item_splits.open_test_split(self, opening)

    def iterate_test_images(self, opening: Opening) -> Iterator[Pixels]:
        from flyte_ddp.core.order.random_state import keep_random_state

        for sample in range(self.test_samples):
            with keep_random_state():
                pixels, _ = self.read_item("test", sample, opening.seed, None)
            yield pixels
