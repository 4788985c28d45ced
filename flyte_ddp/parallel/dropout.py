"""Dropout from random numbers of (seed, epoch, sample): it does not depend on which rank computes a sample."""

import sys

from torch import Tensor, nn

from flyte_ddp.parallel.training_pass import TrainingPass


class SampleDropout(nn.Module):
    """Base class added to torch's dropout layers and torchvision's StochasticDepth: draws by the samples of the pass.

    If the first dimension of a batch is not the number of samples of the pass, the layer draws as its own class does.
    """

    this_pass: TrainingPass
    p: float

    def forward(self, values: Tensor) -> Tensor:
        """Zero each value [N, ...] with probability p, divide the others by 1 - p, and return all.

        Returns the input outside training and for p 0. Dropout1d to 3d zero whole channels, StochasticDepth whole
        samples. Draws once from torch's CPU generator. Changes the input if the layer has ``inplace``.
        """
        if not self.training or self.p == 0.0:
            return values
        if values.shape[:1] != (len(self.this_pass.keys),):
            dropped: Tensor = super().forward(values)
            return dropped
        shape = values.shape[1 : self.count_drawn_dimensions(values)]
        keep = self.this_pass.draw_uniform(tuple(shape)) >= self.p
        scale = keep.to(values.dtype) / (1.0 - self.p) if self.p < 1.0 else keep.to(values.dtype)
        scale = scale.view(*scale.shape, *[1] * (values.dim() - scale.dim()))
        return values.mul_(scale) if getattr(self, "inplace", False) else values * scale

    def count_drawn_dimensions(self, values: Tensor) -> int:
        """Return how many leading dimensions, N included, have a random number for each index.

        Values along the other dimensions are zeroed together: whole channels for Dropout1d to 3d, whole samples for
        StochasticDepth. Dropout has no other dimensions.
        """
        if isinstance(self, (nn.Dropout1d, nn.Dropout3d)):  # they also take a batch without channels
            return 1 if values.dim() == (2 if isinstance(self, nn.Dropout1d) else 4) else 2
        if isinstance(self, nn.Dropout2d):
            return 2
        return values.dim() if isinstance(self, nn.Dropout) else 1


def make_dropout_rank_independent(model: nn.Module, this_pass: TrainingPass) -> None:
    """Change the class of the model's dropout layers to one that draws by the samples of ``this_pass``.

    The new class is a subclass of the old class and has its name, because models may test a layer's type or name.
    Layers with a ``forward`` of their own, and scripted modules, stay as they are.
    """
    for module in model.modules():
        known = [kind.forward for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)]
        # A model can hold torchvision's layer only if torchvision has been imported.
        torchvision_ops = sys.modules.get("torchvision.ops")
        if torchvision_ops is not None and getattr(module, "mode", "") == "row":
            known.append(torchvision_ops.StochasticDepth.forward)
        kind = type(module)
        if getattr(kind, "forward", None) in known:  # the class of a scripted module has no forward
            module.__class__ = type(kind.__name__, (SampleDropout, kind), {"__qualname__": kind.__qualname__})
            module.this_pass = this_pass  # type: ignore[assignment]
