"""The moving average of a model's weights and buffers."""

from collections import defaultdict
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class MovingAverage(AveragedModel):
    """A copy of a model that averages weights and buffers; integers are only copied.

    torch's own update copies its count to the device, for which the host waits in each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        averages = chain(self.module.parameters(), self.module.buffers())
        by_type: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for average, value in zip(averages, chain(model.parameters(), model.buffers()), strict=True):
            if not self.n_averaged:
                average.copy_(value)
                continue
            means, values = by_type[average.dtype]
            means.append(average)
            values.append(value)
        for dtype, (means, values) in by_type.items():
            if dtype.is_floating_point or dtype.is_complex:
                torch._foreach_lerp_(means, values, 1 - self.decay)
            else:
                torch._foreach_copy_(means, values)
        self.n_averaged += 1
