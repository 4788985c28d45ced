"""Dropout from random numbers of (seed, epoch, sample): it does not depend on which rank computes a sample."""

import math
import sys
from types import MethodType

import torch
from torch import Tensor, nn

from flyte_ddp.parallel.training_pass import GOLDEN, TrainingPass, mix_bits

KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
ALPHA = 1.7580993408473766  # of SELU: its limit for small inputs is -ALPHA
TILE_WORDS = 2**15  # random words made at a time on a CPU thread, so that they stay in its cache: 256 KiB


def make_dropout_rank_independent(model: nn.Module, this_pass: TrainingPass) -> None:
    """Give the model's dropout layers a ``forward`` that draws by the samples of ``this_pass``; their classes stay.

    Those are torch's dropout layers and torchvision's StochasticDepth in mode "row". Layers with another ``forward``,
    and scripted modules, stay as they are.
    """

    # A pickled model has torch's own layers, because pickle saves a bound method as its object and its name.
    def forward(layer: nn.Module, values: Tensor) -> Tensor:
        """Return the values [N, ...] with dropout; if N is not the pass's, draw as the layer's class does."""
        if not layer.training or layer.p == 0.0:
            return values
        if values.shape[:1] != this_pass.keys.shape:
            drawn: Tensor = type(layer).forward(layer, values)
            return drawn
        return drop_values(layer, values, this_pass.begin_call())

    replaced = {kind.forward for kind in KINDS}
    # A model can hold torchvision's layer only if torchvision has been imported.
    if (torchvision_ops := sys.modules.get("torchvision.ops")) is not None:
        replaced.add(torchvision_ops.StochasticDepth.forward)
    for module in model.modules():
        # The forward of a scripted module, or one that a user has set, is no method of these classes.
        function = getattr(getattr(module, "forward", None), "__func__", None)
        if function in replaced and getattr(module, "mode", "row") == "row":
            module.forward = MethodType(forward, module)
            this_pass.has_dropout = True


def drop_values(layer: nn.Module, values: Tensor, states: Tensor) -> Tensor:
    """Return the values [N, ...] with the layer's dropout; ``states``, int64 [N], begin the samples' random numbers."""
    p: float = layer.p  # type: ignore[assignment]
    inplace = getattr(layer, "inplace", False)
    keeps_moments = isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout))
    if p == 1.0:
        return values.mul_(0.0) if inplace and not keeps_moments else values * 0.0
    kept = draw_mask(states, values.shape[1 : count_drawn_dimensions(layer, values)], p)
    kept = kept.view(*kept.shape, *[1] * (values.dim() - kept.dim()))
    if keeps_moments:  # as torch's, which takes no notice of inplace
        scale = ((ALPHA**2 * p + 1.0) * (1.0 - p)) ** -0.5
        return torch.where(kept, values * scale + ALPHA * scale * p, ALPHA * scale * (p - 1.0))
    return (values.mul_(kept) if inplace else values * kept).mul_(1.0 / (1.0 - p))


def count_drawn_dimensions(layer: nn.Module, values: Tensor) -> int:
    """Return how many leading dimensions, N included, have a random number for each index; the others drop together."""
    if isinstance(layer, (nn.Dropout1d, nn.Dropout3d)):  # they also take a batch without channels
        return 1 if values.dim() == (2 if isinstance(layer, nn.Dropout1d) else 4) else 2
    if isinstance(layer, (nn.Dropout2d, nn.FeatureAlphaDropout)):
        return 2
    return values.dim() if isinstance(layer, (nn.Dropout, nn.AlphaDropout)) else 1


def draw_mask(states: Tensor, shape: torch.Size, p: float) -> Tensor:
    """Return bool [N, *shape], False with probability p (to 2**-40), for the ``states``, int64 [N], of N samples.

    Needs 4 bytes for each value beside the result on a GPU and when compiled, on a CPU 0.5 MB for each thread.
    """
    # Each 64-bit word of SplitMix64 gives four values 16 bits each. Their probability is a multiple of 2**-16; so each
    # sample rounds p up or down at random, by its first word.
    threshold = ((mix_bits(states.clone()) & (2**24 - 1)) + round(p * 2**40)) >> 24
    threshold = (threshold.clamp_(max=2**16 - 1) - 2**15).to(torch.int16)[:, None]
    count = math.prod(shape)
    steps = torch.arange(1, (count + 3) // 4 + 1, device=states.device) * GOLDEN
    if torch.compiler.is_compiling():  # not by a view as int16: compiled code writes beyond its end (torch 2.15, CPU)
        words = mix_bits(states[:, None] + steps)
        parts = (words[:, :, None] >> torch.arange(0, 64, 16, device=states.device)).to(torch.int16).flatten(1)
        return (parts[:, :count] >= threshold).view(states.shape[0], *shape)
    kept = torch.empty(len(states), count, dtype=torch.bool, device=states.device)
    words_at_once = TILE_WORDS * torch.get_num_threads() if kept.is_cpu else max(1, len(states) * len(steps))
    samples_at_once = max(1, words_at_once // max(1, len(steps)))
    for sample in range(0, len(states), samples_at_once):
        samples = slice(sample, sample + samples_at_once)
        for step in range(0, len(steps), words_at_once):
            words = mix_bits(states[samples, None] + steps[step : step + words_at_once])
            result = kept[samples, 4 * step : 4 * (step + words_at_once)]
            torch.ge(words.view(torch.int16)[:, : result.shape[1]], threshold[samples], out=result)
    return kept.view(len(states), *shape)
