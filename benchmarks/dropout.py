"""What dropout by samples costs a forward and backward pass, beside torch's own dropout.

In one process for each model the sides alternate pass by pass: torch's layers, the same layers with random numbers of
the samples, and no dropout. The blocks are GPT-2's, with dropout of the attention weights and of
both results, as modules.

Time is the processor time of one thread. On a GPU `gpu` has a whole step with dropout.
"""

import copy
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measuring import Options, Result, Target, interleaved
from benchmarks.running import call
from flyte_ddp.launch.supervise.rank import keep_freed_memory
from flyte_ddp.parallel.dropout import make_dropout_rank_independent
from flyte_ddp.parallel.training_pass import TrainingPass

SIDES = BY_SAMPLES, OF_TORCH, NONE = "by samples", "torch's", "none"


class Block(nn.Module):
    """A transformer block of GPT-2: causal attention with dropout of its weights, 4 times the width between."""

    def __init__(self, width: int, p: float, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.of_weights, self.of_attention, self.of_hidden = nn.Dropout(p), nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.attend(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        attended = self.of_weights(scores.masked_fill(later, -torch.inf).softmax(dim=-1)) @ value
        x = x + self.of_attention(self.project(attended.transpose(1, 2).reshape(x.shape)))
        result: Tensor = x + self.of_hidden(self.hidden(self.second(x)))
        return result


def blocks() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.1), Block(256, 0.1), Block(256, 0.1))


def resnet50() -> nn.Module:
    model = torchvision.models.resnet50()
    model.fc = nn.Sequential(nn.Dropout(0.5), model.fc)
    return model  # type: ignore[no-any-return]


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch
    repeats: int
    bf16: bool = False


CASES = {
    "two blocks, width 256, 16 x 128 tokens": Case(blocks, (16, 128, 256), 40),
    "the same in bf16": Case(blocks, (16, 128, 256), 40, bf16=True),
    "ResNet-50, 4 x 224 pixels": Case(resnet50, (4, 3, 224, 224), 8),
    "ViT-B/16, 4 x 224 pixels": Case(lambda: torchvision.models.vit_b_16(dropout=0.1), (4, 3, 224, 224), 8),
}


def measure(options: Options) -> Result:
    result = Result(settings={"threads": 1, "p": 0.1, "p of ResNet-50": 0.5})

    def time_case(name: str, _: int) -> None:
        repeats = options.number(CASES[name].repeats)
        for side, milliseconds in call("benchmarks.dropout:time_passes", name, repeats).items():
            for value in milliseconds:
                result.add(f"{name}: {side}", value, "ms")
        ratio = result.ratio(f"{name}: by samples / torch's", f"{name}: {BY_SAMPLES}", f"{name}: {OF_TORCH}")
        result.ratio(f"{name}: torch's / none", f"{name}: {OF_TORCH}", f"{name}: {NONE}")
        result.targets.append(Target(f"{name}: a pass, of one with torch's dropout", ratio, "x", at_most=1.1))

    for name in CASES:
        interleaved(options, result, {name: functools.partial(time_case, name)}, 1)
    return result


def make_passes(name: str) -> dict[str, Callable[[], None]]:
    """Return a function for each side that does a forward and a backward pass on one thread."""
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make().train()
    models = {BY_SAMPLES: copy.deepcopy(model), OF_TORCH: copy.deepcopy(model), NONE: model}
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    this_pass = TrainingPass()
    make_dropout_rank_independent(models[BY_SAMPLES], this_pass)
    inputs = torch.randn(case.shape)
    samples = np.arange(len(inputs), dtype=np.int32)

    def do_pass(side: str) -> None:
        if side == BY_SAMPLES:
            this_pass.begin_pass(0, 0, samples, torch.device("cpu"))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.bf16):
            output = models[side](inputs)
        functional.mse_loss(output.float(), torch.zeros_like(output).float()).backward()  # type: ignore[no-untyped-call]
        models[side].zero_grad(set_to_none=True)

    return {side: lambda side=side: do_pass(side) for side in SIDES}  # type: ignore[misc]


def time_passes(case: str, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each pass by side."""
    sides = make_passes(case)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(repeats + 1):
        for side, do_pass in sides.items():
            begin = time.process_time()
            do_pass()
            if repeat:  # the first is for warming up
                found[side].append(1000 * (time.process_time() - begin))
    return found
