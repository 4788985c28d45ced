"""Dropout that is a function of the sample: its shares, its scale, and what it depends on."""

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from flyte_ddp.parallel.dropout import SampleDropout, make_dropout_rank_independent
from flyte_ddp.parallel.training_pass import TrainingPass

CPU = torch.device("cpu")
SAMPLES = np.arange(1000, dtype=np.int32)


def on_pass(model: nn.Module, samples: np.ndarray = SAMPLES, *, seed: int = 0, epoch: int = 0) -> TrainingPass:
    this_pass = TrainingPass()
    make_dropout_rank_independent(model, this_pass)
    this_pass.begin_pass(seed, epoch, samples, CPU)
    return this_pass


def test_the_stream_is_splitmix64() -> None:
    """Against the reference implementation's first numbers for the seed 1234567 (Vigna, splitmix64.c)."""
    this_pass = TrainingPass()
    golden = 0x9E3779B97F4A7C15
    # The reference adds the constant before its first output, ours after.
    this_pass.keys = torch.tensor([1234567 + golden - 2**64])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert this_pass.draw_uniform((4,)).tolist() == [
        [pytest.approx((value >> 40) / 2**24, abs=0) for value in expected]
    ]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("layer", "shape", "drawn"),
    [
        (nn.Dropout, (30,), (30,)),
        (nn.Dropout, (5, 3, 2), (5, 3, 2)),
        (nn.Dropout1d, (5, 3), (5,)),
        (nn.Dropout1d, (5,), ()),  # for torch one sample of 1000 channels
        (nn.Dropout2d, (5, 3, 2), (5,)),
        (nn.Dropout3d, (5, 3, 2, 2), (5,)),
        (nn.Dropout3d, (5, 3, 2), ()),
        (lambda p: StochasticDepth(p, "row"), (5, 3, 2), ()),
    ],
)
def test_what_is_dropped(layer, shape: tuple[int, ...], drawn: tuple[int, ...], p: float) -> None:
    model = nn.Sequential(layer(p))
    on_pass(model)
    output = model(torch.ones(1000, *shape))
    assert output.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
    of_torch = layer(p)(torch.ones(1000, *shape)).view(1000, *drawn, -1)
    assert (of_torch == of_torch[..., :1]).all(), "torch's layer draws for the same"
    draws = output.view(1000, *drawn, -1)
    assert (draws == draws[..., :1]).all(), "one draw for all that is dropped together"
    number = draws[..., 0].numel()
    dropped = (draws[..., 0] == 0).sum().item()
    assert abs(dropped - p * number) < 5 * (p * (1 - p) * number) ** 0.5  # five standard deviations


def test_numbers_are_uniform_and_independent() -> None:
    this_pass = TrainingPass()
    this_pass.begin_pass(3, 4, SAMPLES, CPU)
    first, second = this_pass.draw_uniform((100,)), this_pass.draw_uniform((100,))
    this_pass.begin_pass(3, 5, SAMPLES, CPU)
    next_epoch = this_pass.draw_uniform((100,))
    counts = torch.histc(first, bins=100, min=0, max=1)
    assert ((counts - 1000).square() / 1000).sum() < 170  # chi-square, 99 degrees of freedom: one in 100,000
    neighbours = [(first, second), (first, next_epoch), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])]
    for one, other in neighbours:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / one.numel() ** 0.5


def test_a_samples_draws_do_not_depend_on_its_batch() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    this_pass = on_pass(model, SAMPLES[:8])
    whole = model(torch.ones(8, 50))
    this_pass.begin_pass(0, 0, SAMPLES[5:8], CPU)
    assert torch.equal(model(torch.ones(3, 50)), whole[5:])
    this_pass.begin_pass(1, 0, SAMPLES[5:8], CPU)
    assert not torch.equal(model(torch.ones(3, 50)), whole[5:])


def test_evaluations_and_batches_that_do_not_count_samples_are_left_to_the_layer() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    on_pass(model, SAMPLES[:4])
    assert set(model(torch.ones(8, 100)).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval()(torch.ones(4, 3)), torch.ones(4, 3))


def test_every_place_of_a_layer_is_replaced_and_state_dict_stays() -> None:
    layer = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(2, 2), layer, nn.Sequential(layer), layer)
    before = list(model.state_dict())
    on_pass(model)
    assert all(isinstance(dropout, SampleDropout) for dropout in (model[1], model[2][0], model[3]))
    assert list(model.state_dict()) == before


def test_a_layer_stays_what_it_is() -> None:
    """Models ask what a layer is (to keep dropout on in evaluations), and for its p; hooks are called."""

    class Own(nn.Dropout):
        pass

    for layer in (nn.Dropout(0.3), nn.Dropout2d(0.3), Own(0.3), StochasticDepth(0.3, "row")):
        kind = type(layer)
        layer.register_forward_hook(lambda *_: torch.zeros(()))
        on_pass(nn.Sequential(layer))
        assert isinstance(layer, SampleDropout)
        assert isinstance(layer, kind)
        assert (type(layer).__name__, type(layer).__qualname__) == (kind.__name__, kind.__qualname__)
        assert (layer.p, layer(torch.ones(1000, 3)).item()) == (0.3, 0.0)
