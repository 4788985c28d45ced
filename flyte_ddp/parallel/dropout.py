"""Dropout as a function of (seed, epoch, sample), so that it does not depend on which rank a sample falls to."""

from __future__ import annotations

import sys

from torch import Tensor, nn

from flyte_ddp.parallel.training_pass import TrainingPass


class SampleDropout(nn.Module):
    """What dropout layers and torchvision's StochasticDepth become: zeros whole values, channels or samples.

    Where the first dimension does not count the samples of the pass, they do what they did.
    """

    this_pass: TrainingPass
    p: float

    def forward(self, values: Tensor) -> Tensor:
        """[N, ...] to the same shape; what is kept is scaled by 1 / (1 - p)."""
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
        """The leading dimensions that have a draw for each of their places."""
        if isinstance(self, (nn.Dropout1d, nn.Dropout3d)):  # which take one dimension less for channels alone
            return 1 if values.dim() == (2 if isinstance(self, nn.Dropout1d) else 4) else 2
        if isinstance(self, nn.Dropout2d):
            return 2
        return values.dim() if isinstance(self, nn.Dropout) else 1


def derive_dropout_from_samples(model: nn.Module, this_pass: TrainingPass) -> None:
    """Has the model's dropout layers, in place, draw from ``this_pass``. They stay what they are in all else."""
    for module in model.modules():
        if is_dropout(module):
            kind = type(module)  # which stays one of its classes, as models ask what a layer is
            # Some also compare names.
            module.__class__ = type(kind.__name__, (SampleDropout, kind), {"__qualname__": kind.__qualname__})
            module.this_pass = this_pass  # type: ignore[assignment]


def is_dropout(module: nn.Module) -> bool:
    """Whether it is a layer whose arithmetic :class:`SampleDropout` knows."""
    known = [kind.forward for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)]
    # A model can hold torchvision's layer only if torchvision has been imported.
    torchvision_ops = sys.modules.get("torchvision.ops")
    if torchvision_ops is not None and getattr(module, "mode", "") == "row":
        known.append(torchvision_ops.StochasticDepth.forward)
    return getattr(type(module), "forward", None) in known  # scripted modules have none
