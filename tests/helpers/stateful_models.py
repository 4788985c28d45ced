"""Models that do what plain PyTorch allows: blocks run again for the backward pass, and buffers changed on the way.

All are for grey images of 8x8 pixels.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import faults
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Run = Callable[[nn.Module, Tensor], Tensor]


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def not_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: not_reentrant(block, y), x, use_reentrant=False)


def nested_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: reentrant(block, y), x, use_reentrant=True)


def sequential(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(block, 2, x, use_reentrant=False)


class Blocks(nn.Module):
    """A stem, three blocks that are run in some way, and a head; one dropout layer has two places in each block."""

    def __init__(self, block: Callable[[], nn.Module], run: Run) -> None:
        super().__init__()
        self.stem, self.run = nn.Linear(64, 16), run
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(1))
        for block in self.blocks:
            x = self.run(block, x) if self.training else block(x)
        return self.head(x.flatten(1))


class Place(nn.Module):
    """Where a layer that has several is used; without it, checkpoint_sequential leaves out all but the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def with_dropout() -> nn.Module:
    twice = nn.Dropout(0.4)
    return nn.Sequential(nn.Linear(16, 16), Place(twice), nn.ReLU(), nn.Linear(16, 16), Place(twice), nn.Dropout(0.1))


def with_batch_norm() -> nn.Module:
    """At the end, so that the block is left in the middle of it when it is run again."""
    again = (nn.Flatten(), nn.Linear(16, 16), nn.Unflatten(1, (4, 2, 2)))
    return nn.Sequential(*again, nn.BatchNorm2d(4), nn.ReLU(), *again, nn.BatchNorm2d(4))


RUNS: dict[str, Run] = {
    "plain": lambda block, x: block(x),
    **{run.__name__: run for run in (reentrant, not_reentrant, nested, nested_reentrant, sequential)},
}


def _factory(block: Callable[[], nn.Module], run: Run) -> Callable[..., nn.Module]:
    def make(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        return Blocks(block, run)

    return make


for _name, _run in RUNS.items():  # dropout_plain, batch_norm_reentrant and so on
    globals()[f"dropout_{_name}"] = _factory(with_dropout, _run)
    globals()[f"batch_norm_{_name}"] = _factory(with_batch_norm, _run)


class Tutorials(nn.Module):
    """What tutorials do with shapes, and what refuses an empty batch, or the strides of another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True)
        self.attention = nn.MultiheadAttention(36, 2, batch_first=True)
        self.head = nn.Linear(144, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images))
        x = x.view(x.size(0), -1).reshape(x.size(0), 4, -1)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = x.reshape(x.size(0), -1)
        assert int(x.argmax(1).max()) >= 0  # fails on an empty batch
        return self.head(x / x.amax(dim=1, keepdim=True).abs().clamp(min=1))


def tutorials(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Tutorials()


class Centred(nn.Module):
    """Follows the mean of its inputs in buffers of many kinds, and takes it away from them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(64))
        self.register_buffer("replaced", torch.zeros(64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(64), persistent=False)
        self.register_buffer("constant", torch.ones(64))
        self.frozen = nn.Parameter(torch.zeros(64), requires_grad=False)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        faults.passing("training" if self.training else "evaluation")
        if self.training:
            mean = x.detach().mean(0)
            self.centre.data.mul_(0.9).add_(mean, alpha=0.1)  # of which autograd's counter of versions knows nothing
            self.replaced = 0.9 * self.replaced + 0.1 * mean
            self.passes += 1
            self.hidden.lerp_(mean, 0.1)
            self.frozen.data.lerp_(mean, 0.1)
            if not hasattr(self, "late"):
                self.register_buffer("late", mean)
        x = x - self.centre - self.replaced - self.hidden - self.frozen
        return self.head(x * self.constant)


def centred(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Centred()


class Noisy(nn.Module):
    """Draws from every generator there is, and leaves out layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        faults.passing("training" if self.training else "evaluation")
        for layer in self.layers:
            if self.training and (random.random() < 0.3 or np.random.random() < 0.1):  # noqa: NPY002
                continue
            x = nn.functional.dropout(layer(x).relu() + x, 0.2, self.training)
        return self.head(x + 0.1 * torch.randn_like(x) if self.training else x)


def noisy(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Noisy()


class Unusual(nn.Module):
    """What plain PyTorch allows to keep in a model; fails where it is not what it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)
        self.head = nn.Linear(144, 10)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
        self.register_buffer("half_ones", torch.ones(4, dtype=torch.half))
        self.register_buffer("expanded", torch.ones(1).expand(144), persistent=False)
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scale", None, persistent=False)
        self.remembered: dict[int, Tensor] = {}
        self.dropout.register_forward_hook(lambda *call: call[-1] * 2)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        assert not self.norm.training
        assert self.dropout.p == 0.1
        assert self.turn.imag.abs().sum() > 1
        assert self.half_ones.dtype == torch.half
        if self.scale is None or len(self.scale) != len(images):
            self.scale = torch.ones(len(images), 1)
        with torch.enable_grad():  # such as a model of energies does, also in evaluation
            energy = images.detach().requires_grad_()
            (force,) = torch.autograd.grad(energy.square().sum(), energy)
        x = self.norm(self.conv(images + 0.1 * force)).flatten(1)
        if not self.remembered:
            self.remembered[0] = self.head.weight.new_ones(10)
        return self.head(self.dropout(x * self.expanded * self.scale)) * self.remembered[0]


def unusual(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Unusual()


def unusual_without_sparse(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    model = Unusual()
    model.sparse = None
    return model


class Growing(nn.Module):
    """Has a bank of samples that grows, a buffer that is there from the second epoch on, and a count of passes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("bank", torch.zeros(0, 64))
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            self.passes += 1
            self.bank = torch.cat([self.bank, x[:1].detach()])
            if self.passes > 15 and not hasattr(self, "late"):
                self.register_buffer("late", x[0].detach())
        logits = self.head(x - self.bank.mean(0))
        return logits if self.training or not hasattr(self, "late") else -logits


def growing(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Growing()


class FromThirdStep(nn.Module):
    """Changes a buffer that two modules share, from the third step on, by what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.passes, shared = 0, torch.zeros(16)
        self.body.register_buffer("centre", shared)
        self.head.register_buffer("centre", shared)

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images.flatten(1))
        if self.training:
            self.passes += 1
            if self.passes > 6:
                self.body.centre.lerp_(x.detach().mean(0), 0.1)
        return self.head(x - self.head.centre)


def from_third_step(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return FromThirdStep()


class Uncertain(nn.Module):
    """Drops in evaluations too, as for the uncertainty of its outputs, by a layer and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(64, 10)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.train()
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = self.head(self.dropout(images.flatten(1)))
        return x if self.training else nn.functional.dropout(x, 0.1, training=True)


def uncertain(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Uncertain()


class Twice(nn.Module):
    """One block in two places, whose buffers have two names in the state_dict, and a cut in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.first, self.second, self.head = block, block, nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        faults.passing("training" if self.training else "evaluation")
        return self.head(self.second(x))


def twice(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Twice()


class OwnBatchNorm(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), OwnBatchNorm(4), nn.Linear(144, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(images)).flatten(1))


def subclassed(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Subclassed()


class LeavesOut(nn.Module):
    """Each pass leaves out one of two layers with BatchNorm, so that ranks go through different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers[int(torch.rand(()) < 0.5)](images.flatten(1)))


def leaves_out(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return LeavesOut()


def lazy(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


class Penalty(torch.autograd.Function):
    """Hands a value through, and adds a loss of its own, as layers do that spread samples over experts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        [weight] = ctx.saved_tensors
        return gradient, 0.02 * weight


class Penalised(nn.Module):
    """Gradients that do not come from the loss: of a hook, and of a loss of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10)
        self.first.weight.register_hook(lambda gradient: gradient + 0.05 * self.first.weight.detach())

    def forward(self, images: Tensor) -> Tensor:
        return self.second(Penalty.apply(self.first(images.flatten(1)).tanh(), self.second.weight))


def penalised(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Penalised()


class Thawing(nn.Module):
    """Trains its first layer later than its second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8).requires_grad_(False), nn.Linear(8, 10)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        self.first.requires_grad_(self.passes > 2)
        return self.second(self.first(images.flatten(1)))


def thawing(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Thawing()


class Resized(nn.Module):
    """Resizes a buffer in place, as torch's observers for quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            self.largest.resize_(64 if len(self.largest) == 65 else 65).fill_(0).narrow(0, 0, 64).copy_(x.detach()[0])
        return self.head(x)


def resized(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Resized()


def scripted(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 10))
    return torch.jit.script(layers)


class Mean:
    def __init__(self) -> None:
        self.value = torch.zeros(64)

    def __call__(self, x: Tensor) -> Tensor:
        self.value = 0.9 * self.value + 0.1 * x.detach().mean(0)
        return self.value


class Hidden(nn.Module):
    """Changes what no file holds, in ways that are hard to see, and keeps other things as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale, self.dropout = nn.Linear(64, 10), nn.Parameter(torch.ones(())), nn.Dropout(0.1)
        self.object, self.numbers = Mean(), random.Random(1)
        self.generator, self.queue = torch.Generator().manual_seed(1), deque[Tensor](maxlen=3)
        self.features: dict[str, Tensor] = {}
        self.others = [self.head, self.scale, self.dropout]
        self.function = lambda x: x

    def forward(self, images: Tensor) -> Tensor:
        x = self.function(images.flatten(1))
        if self.training:
            x = x - self.object(x) + self.numbers.random()
            x = x + torch.randn(64, generator=self.generator)
            self.queue.append(x.detach().mean(0))
            x = x - sum(self.queue)
        self.features["x"] = self.head(x) * self.dropout(self.scale)
        return self.features["x"]


def hidden(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Hidden()


class SetByData(nn.Module):
    """Sets a trained weight by the first batch, as Glow's ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.shift = nn.Linear(64, 10), nn.Parameter(torch.zeros(64))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training and not self.is_set:
            self.shift.data.copy_(-x.mean(0))
            self.is_set.fill_(True)
        return self.head(x + self.shift)


def set_by_data(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return SetByData()


class InPlace(nn.Module):
    """Takes no notice of what dropout returns."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.dropout = nn.Linear(64, 10), nn.Dropout(1.0, inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1).clone()
        self.dropout(x)
        assert not (self.training and x.any())
        return self.head(x)


def in_place(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return InPlace()


class Drawn(nn.Module):
    """Drawn from each generator there is when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.order = nn.Linear(64, 10), random.sample(range(64), 64)
        self.register_buffer("scale", torch.from_numpy(np.random.random(64).astype("float32")))  # noqa: NPY002

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1)[:, self.order] * self.scale)


def drawn(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Drawn()


class Stages(nn.Module):
    """Counts how often it is put into training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stage = nn.Linear(64, 10), 0

    def train(self, mode: bool = True) -> nn.Module:
        self.stage += mode
        return super().train(mode)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def stages(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Stages()


class FrozenBody(nn.Module):
    """A frozen layer before the one that is trained, and a cut in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        return self.head(self.body(images.flatten(1)))


def frozen_body(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return FrozenBody()


class Complex(nn.Module):
    """Has a complex parameter, as models in the frequency domain do."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(8, 5, dtype=torch.cdouble)), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        filtered = torch.fft.rfft2(images[:, 0]) * self.filter
        return self.head(torch.fft.irfft2(filtered, s=(8, 8)).flatten(1))


def complex_filter(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Complex()


class NoBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, bias=False), nn.Linear(144, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(images)).flatten(1))


def no_bias(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return NoBias()


def sparse_embedding(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Embedding(17, 8, sparse=True))


def nothing_to_train(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10).requires_grad_(False))


def no_parameters(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Flatten()


class OnlyInEvaluation(nn.Module):
    """Returns something else in evaluation."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(64, 10), change

    def forward(self, images: Tensor) -> object:
        logits = self.head(images.flatten(1))
        return logits if self.training else self.change(logits)


def pair_in_evaluation(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return OnlyInEvaluation(lambda logits: (logits, logits))


def three_classes_in_evaluation(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return OnlyInEvaluation(lambda logits: logits[:, :3])


class ExtraState(nn.Module):
    """Has an extra state of its own in its state_dict, and is cut off in the middle of a pass."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(64, 10), extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        assert (type(state), state) == (type(self.extra), self.extra)

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        return self.head(images.flatten(1))


def extra_numpy(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ExtraState({"version": 3, "temperatures": [np.float64(1.5)]})


def extra_tuple(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ExtraState(({"shape": (3, 4)}, [1.5, OrderedDict(name="x")], {"a"}))


class Adapter(FrozenBody):
    """Keeps its frozen part out of its state_dict, as adapters (LoRA) do."""

    def state_dict(self, *arguments: object, **options: object) -> dict[str, Tensor]:
        saved = super().state_dict(*arguments, **options)
        return {name: value for name, value in saved.items() if not name.startswith("body.")}

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> object:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def adapter(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return Adapter()


class GivesUp(nn.Module):
    """Sets a buffer to None in the second epoch, and is cut off in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("warm", torch.ones(64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        if self.training:
            self.passes += 1
            if self.passes > 4:
                self.warm = None
        return self.head(images.flatten(1) * (self.scale if self.warm is None else self.warm))


def gives_up(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return GivesUp()


class InList(nn.Module):
    """Follows its weights with a module that is kept where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.teacher, self.constant = [copy.deepcopy(self.head)], [copy.deepcopy(self.head)]

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        with torch.no_grad():
            if self.training:
                for its, own in zip(self.teacher[0].parameters(), self.head.parameters(), strict=True):
                    its.lerp_(own, 0.3)
            taught = self.teacher[0](x) + self.constant[0](x)
        return self.head(x) + taught


def in_list(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return InList()


class ByFirstBatch(nn.Module):
    """Keeps, in no buffer, the mean of the first batch it sees, and what is the same for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.mean: Tensor | None = None
        self.ones: Tensor | None = None

    def forward(self, images: Tensor) -> Tensor:
        faults.passing("training" if self.training else "evaluation")
        x = images.flatten(1)
        if self.mean is None:
            self.mean, self.ones = x.detach().mean(0), torch.ones(64)
        return self.head((x - self.mean) * self.ones)


def by_first_batch(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return ByFirstBatch()


class TwoNames(nn.Module):
    """Changes a frozen parameter that two modules share, and is cut off in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first, self.second = nn.Linear(64, 10), nn.Module(), nn.Module()
        self.first.centre = self.second.centre = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        if self.training:
            self.first.centre.data.lerp_(x.detach().mean(0), 0.2)
        faults.passing("training" if self.training else "evaluation")
        return self.head(x - self.second.centre)


def two_names(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return TwoNames()


class NoisyGradient(nn.Module):
    """Draws in the backward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.head.weight.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))


def noisy_gradient(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return NoisyGradient()
