"""The moving average of a model's weights and buffers."""

from collections import defaultdict
from collections.abc import Iterator
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
        """Add the model's weights and buffers, by name, to their averages; the first call copies them."""
        newest = dict(list_tensors(model, remove_duplicate=False))
        by_type: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, average in list_tensors(self.module):
            if name not in newest:  # a buffer that was removed, which the end of the epoch refuses
                continue
            if not self.n_averaged:
                average.copy_(newest[name])
                continue
            means, values = by_type[average.dtype]
            means.append(average)
            values.append(newest[name].to(average.device))  # a model may have made a buffer anew, on the CPU
        for dtype, (means, values) in by_type.items():
            if dtype.is_floating_point or dtype.is_complex:
                torch._foreach_lerp_(means, values, 1 - self.decay)
            else:
                torch._foreach_copy_(means, values)
        self.n_averaged += 1


def list_tensors(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=remove_duplicate)
    return chain(parameters, module.named_buffers(remove_duplicate=remove_duplicate))
