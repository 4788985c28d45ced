"""BatchNorm over several ranks against torch's own BatchNorm in one process on the whole batch."""

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.core.parallel.batch_norm import (
    compute_mean_running_statistics,
    has_unsynchronised_batch_norm,
    is_synchronised,
    synchronise_batch_norm,
)
from flyte_ddp.core.parallel.training_pass import TrainingPass

SHARES = [(3, 2, 2), (2, 1, 0), (1, 1, 0), (0, 0, 5)]  # samples of each rank


class Activated(nn.BatchNorm2d):
    """Computes more than torch's, as layers of models do."""

    def forward(self, values: Tensor) -> Tensor:
        return functional.leaky_relu(super().forward(values.mul(2)), 0.1)


class Spelled(nn.BatchNorm2d):
    """Has torch's lines in its own forward, as timm's BatchNormAct2d."""

    def forward(self, values: Tensor) -> Tensor:
        self.num_batches_tracked.add_(self.training)
        kept = self.running_mean, self.running_var, self.weight, self.bias
        return functional.batch_norm(values, *kept, self.training, self.momentum, self.eps).sigmoid()


class Halves(nn.BatchNorm2d):
    """Normalises the first and the second half of its samples by themselves."""

    def forward(self, values: Tensor) -> Tensor:
        first, second = values.chunk(2)
        return torch.cat((super().forward(first), super().forward(second)))


def frozen_weight() -> nn.Module:
    layer = nn.BatchNorm2d(3, dtype=torch.float64)
    layer.weight.requires_grad_(False)
    return layer


LAYERS = {
    "2d": lambda: nn.BatchNorm2d(3, dtype=torch.float64),
    "1d": lambda: nn.BatchNorm1d(3, dtype=torch.float64),
    "cumulative average": lambda: nn.BatchNorm2d(3, momentum=None, dtype=torch.float64),
    "not affine": lambda: nn.BatchNorm2d(3, affine=False, dtype=torch.float64),
    "no bias": lambda: nn.BatchNorm2d(3, bias=False, dtype=torch.float64),
    "frozen weight": frozen_weight,
    "no running statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False, dtype=torch.float64),
    "calls torch's forward": lambda: Activated(3, dtype=torch.float64),
    "calls torch's function": lambda: Spelled(3, dtype=torch.float64),
    "torch's SyncBatchNorm": lambda: nn.SyncBatchNorm(3, dtype=torch.float64),
}


def own_share(whole: Tensor, samples: tuple[int, ...]) -> Tensor:
    return whole.split(samples)[dist.get_rank()]


def one_process(layer: nn.Module) -> nn.Module:
    """The layer as torch would run it alone: SyncBatchNorm refuses CPUs, and is BatchNorm2d here."""
    alone = copy.deepcopy(layer)
    if isinstance(alone, nn.SyncBatchNorm):
        alone.__class__ = nn.BatchNorm2d
    return alone


def compare_layers(*, on_one_machine: bool) -> None:
    torch.manual_seed(0)  # the whole batch is the same on all ranks, which take their share of it
    for name, make in LAYERS.items():
        ours = make()
        for parameter in ours.parameters():
            nn.init.normal_(parameter)
        reference = one_process(ours)
        model = nn.Sequential(ours)
        synchronise_batch_norm(model, TrainingPass(), on_one_machine=on_one_machine)
        model = copy.deepcopy(model) if on_one_machine else model  # as the moving average is
        ours = model[0]
        sides = () if name == "1d" else (4, 2)
        for samples in SHARES:
            whole = torch.randn(sum(samples), 3, *sides, dtype=torch.float64) * 10 + 100
            gradient = torch.randn_like(whole)
            if len(sides) == 2:
                whole = whole.contiguous(memory_format=torch.channels_last)
            expected = whole.clone().requires_grad_()
            reference.zero_grad()
            output = reference(expected)
            output.backward(gradient)

            own = own_share(whole, samples).clone().requires_grad_()
            ours.zero_grad()
            model(own).backward(own_share(gradient, samples))
            close = {"rtol": 1e-10, "atol": 1e-10}
            torch.testing.assert_close(model[0](own.detach()), own_share(output.detach(), samples), **close)
            reference(expected.detach())  # the running statistics of the pass just made
            torch.testing.assert_close(own.grad, own_share(expected.grad, samples), **close)
            for parameter, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
                if parameter.requires_grad:
                    dist.all_reduce(parameter.grad)
                torch.testing.assert_close(parameter.grad, theirs.grad, **close)
            assert ours.state_dict().keys() == reference.state_dict().keys()
            for key, value in reference.state_dict().items():
                torch.testing.assert_close(ours.state_dict()[key], value, **close)
        model.eval()
        reference.eval()
        some = whole[: dist.get_rank() + 1]  # evaluation asks nothing of the other ranks
        if dist.get_rank() != 1:
            torch.testing.assert_close(model(some), reference(some), **close)


def refuse_a_single_value() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    synchronise_batch_norm(model, TrainingPass(), on_one_machine=False)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.randn(int(dist.get_rank() == 1), 2))


def refuse_to_differentiate_twice() -> None:
    """As what the second time gives would be wrong."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    synchronise_batch_norm(model, TrainingPass(), on_one_machine=False)
    values = torch.randn(4, 3, requires_grad=True)
    [gradient] = torch.autograd.grad(model(values).square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def average_by_samples() -> None:
    own = float(dist.get_rank())
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2, track_running_stats=False), nn.Linear(2, 2))
    model[0].running_mean.fill_(own)
    model[0].running_var.fill_(10 * own)
    averaged = compute_mean_running_statistics(model, samples=[30, 10, 20][dist.get_rank()])
    assert [id(statistic) for statistic, _ in averaged] == [id(model[0].running_mean), id(model[0].running_var)]
    mean = torch.full((2,), (0 * 30 + 1 * 10 + 2 * 20) / 60, dtype=torch.float64)
    torch.testing.assert_close([average for _, average in averaged], [mean, 10 * mean])


def normalise_in_all_ways(_: Path) -> None:
    compare_layers(on_one_machine=False)
    compare_layers(on_one_machine=True)
    refuse_a_single_value()
    refuse_to_differentiate_twice()
    average_by_samples()


@pytest.mark.slow
def test_batch_norm_on_three_ranks(tmp_path: Path) -> None:
    assert run_ranks(normalise_in_all_ways, tmp_path, 3) == [0, 0, 0]


def test_a_model_keeps_its_state_its_classes_and_its_other_layers() -> None:
    """And a file of the whole model has torch's own layers."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.InstanceNorm2d(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    synchronise_batch_norm(model, TrainingPass(), on_one_machine=False)
    assert [is_synchronised(layer) for layer in model] == [False, True, False]
    assert type(model[1]) is nn.BatchNorm2d, "models ask for that, such as those that keep such layers frozen"
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    file = io.BytesIO()
    torch.save(model, file)
    assert b"flyte_ddp" not in file.getvalue()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(loaded[1]) is nn.BatchNorm2d
    assert not is_synchronised(loaded[1])


def test_a_layer_that_normalises_parts_of_its_input_is_not_said_to_be_synchronised() -> None:
    model = nn.Sequential(Halves(2), nn.BatchNorm2d(2))
    assert has_unsynchronised_batch_norm(nn.Sequential(nn.Flatten(), Halves(2)), synchronised=False)
    synchronise_batch_norm(model, TrainingPass(), on_one_machine=False)
    values = torch.randn(4, 2, 3, 3) + 5
    torch.testing.assert_close(model[0](values), Halves(2)(values))
    assert [is_synchronised(layer) for layer in model] == [False, True]
    assert has_unsynchronised_batch_norm(model, synchronised=True)
