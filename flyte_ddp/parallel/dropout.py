"""Dropout as a function of (seed, epoch, sample), so that it does not depend on which rank a sample falls to."""

import sys

from torch import Tensor, nn

from flyte_ddp.parallel.training_pass import TrainingPass


class SampleDropout(nn.Module):
    """Base class added to dropout layers and torchvision's StochasticDepth: zeros whole values, channels or samples.

    A layer that gets a batch whose first dimension does not count the samples of the pass does what it did before.
    """

    this_pass: TrainingPass
    p: float

    def forward(self, values: Tensor) -> Tensor:
        """Return [N, ...] values of which a share p is zero and the others are scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0.0:
            return values
        if values.shape[:1] != (len(self.this_pass.keys),):
            dropped: Tensor = super().forward(values)
            return dropped
        shape = values.shape[1 : self.drawn_dimensions(values)]
        keep = self.this_pass.uniform(tuple(shape)) >= self.p
        scale = keep.to(values.dtype) / (1.0 - self.p) if self.p < 1.0 else keep.to(values.dtype)
        scale = scale.view(*scale.shape, *[1] * (values.dim() - scale.dim()))
        return values.mul_(scale) if getattr(self, "inplace", False) else values * scale

    def drawn_dimensions(self, values: Tensor) -> int:
        """Return how many leading dimensions have a random number for each of their places."""
        if isinstance(self, (nn.Dropout1d, nn.Dropout3d)):  # which take one dimension less for channels alone
            return 1 if values.dim() == (2 if isinstance(self, nn.Dropout1d) else 4) else 2
        if isinstance(self, nn.Dropout2d):
            return 2
        return values.dim() if isinstance(self, nn.Dropout) else 1


def derive_dropout_from_samples(model: nn.Module, this_pass: TrainingPass) -> None:
    """Change the class of the model's dropout layers to one that draws from ``this_pass``.

    The new class is a subclass of the old one with its name, because models ask what a layer is, and some by name.
    """
    for module in filter(is_dropout, model.modules()):
        kind = type(module)
        module.__class__ = type(kind.__name__, (SampleDropout, kind), {"__qualname__": kind.__qualname__})
        module.this_pass = this_pass  # type: ignore[assignment]


def is_dropout(module: nn.Module) -> bool:
    """Return whether the module is a layer whose arithmetic :class:`SampleDropout` knows; scripted ones are not."""
    known = [kind.forward for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)]
    # A model can hold torchvision's layer only if torchvision has been imported.
    torchvision_ops = sys.modules.get("torchvision.ops")
    if torchvision_ops is not None and getattr(module, "mode", "") == "row":
        known.append(torchvision_ops.StochasticDepth.forward)
    return getattr(type(module), "forward", None) in known
