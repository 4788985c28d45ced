"""Dropout that is a function of the sample: its shares, its scale, and what it depends on."""

import copy
import io

import numpy as np
import parallel_models
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel import dropout
from flyte_ddp.core.parallel.dropout import draw_mask, make_dropout_rank_independent
from flyte_ddp.core.parallel.training_pass import GOLDEN, TrainingPass, mix_bits_in_place

CPU = torch.device("cpu")
SAMPLES = np.arange(1000, dtype=np.int32)
# torch's compiler looks at an attribute of all tensors.
OF_THE_COMPILER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def on_pass(
    model: nn.Module, samples: np.ndarray = SAMPLES, *, seed: int = 0, epoch: int = 0, fused_on: str = "cuda"
) -> TrainingPass:
    this_pass = TrainingPass()
    make_dropout_rank_independent(model, this_pass, fused_on=fused_on)
    this_pass.begin_pass(seed, epoch, samples, CPU)
    return this_pass


def draws(model: nn.Module, *shape: int, samples: np.ndarray = SAMPLES, seed: int = 0, epoch: int = 0) -> Tensor:
    """Return what the model makes of ones, as one number for each value: 0 for dropped, 1 for kept."""
    on_pass(model, samples, seed=seed, epoch=epoch)
    return (model(torch.ones(len(samples), *shape)) != 0).double()


def test_the_stream_is_splitmix64() -> None:
    """Against the reference implementation's first numbers for the seed 1234567 (Vigna, splitmix64.c)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    words = mix_bits_in_place(1234567 + torch.arange(1, 5) * GOLDEN)
    assert [word % 2**64 for word in words.tolist()] == expected


def plain_mask(state: int, count: int, p: float) -> list[bool]:
    """Return a sample's mask, in plain integers."""

    def word(number: int) -> int:
        x = (state + number * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    threshold = round(p * 2**40) + word(0) % 2**24 >> 24  # p * 2**16, rounded up or down
    parts = [word(at // 4 + 1) >> 16 * (at % 4) & 0xFFFF for at in range(count)]
    return [(part ^ 0x8000) >= threshold for part in parts]  # as signed numbers, the half from 2**15 on comes first


@pytest.mark.parametrize("p", [1e-5, 0.1])
@pytest.mark.parametrize(("samples", "count", "tile"), [(3, 2, 100), (3, 1001, 2**15), (5, 999, 300), (2, 4000, 300)])
def test_a_mask_is_four_values_a_word(monkeypatch, samples: int, count: int, tile: int, p: float) -> None:
    """Whatever number of words is made at a time: many samples, one, or a part of one."""
    monkeypatch.setattr(dropout, "TILE_WORDS", tile)
    states = torch.randint(-(2**63), 2**63 - 1, (samples,), generator=torch.Generator().manual_seed(0))
    assert draw_mask(states, torch.Size((count,)), p).tolist() == [plain_mask(s, count, p) for s in states.tolist()]


@pytest.mark.parametrize(
    ("layer", "shape", "drawn"),
    [
        (nn.Dropout, (5, 3, 2), (5, 3, 2)),
        (nn.Dropout1d, (5, 3), (5,)),
        (nn.Dropout1d, (5,), ()),  # for torch one sample of 1000 channels
        (nn.Dropout2d, (5, 3, 2), (5,)),
        (nn.Dropout3d, (5, 3, 2, 2), (5,)),
        (nn.Dropout3d, (5, 3, 2), ()),
        (lambda p: StochasticDepth(p, "row"), (5, 3, 2), ()),
    ],
)
def test_what_is_dropped(layer, shape: tuple[int, ...], drawn: tuple[int, ...]) -> None:
    """The two values that a layer makes of a value, and which values it draws together, are torch's."""
    p = 0.1
    model, of_torch = nn.Sequential(layer(p)), layer(p)
    on_pass(model)
    values = torch.full((1000, *shape), 2.0, dtype=torch.float64)
    output, expected = model(values), of_torch(values)
    torch.testing.assert_close(output.unique(), expected.unique(), rtol=1e-14, atol=0)
    dropped = expected.unique()[0]  # of 2, the smaller one
    for result in (expected, output):
        by_draw = result.view(1000, *drawn, -1)
        assert (by_draw == by_draw[..., :1]).all(), "one draw for all that is dropped together"
    number = by_draw[..., 0].numel()
    share = (by_draw[..., 0] < dropped + 0.01).sum().item() - p * number
    assert abs(share) < 5 * (p * (1 - p) * number) ** 0.5  # five standard deviations


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_gradients_are_torchs(kind: type[nn.Module], inplace: bool, p: float) -> None:
    """A layer's gradient is its output's slope, by finite differences; and inplace changes what torch's changes."""
    layer = kind(p, inplace)
    this_pass = on_pass(nn.Sequential(layer), SAMPLES[:3])
    sides = {nn.Dropout1d: (2,), nn.Dropout2d: (2, 2)}.get(kind, (2, 2, 2))
    values = torch.randn(3, 4, *sides, dtype=torch.float64, requires_grad=True)

    def again(values: Tensor) -> Tensor:
        this_pass.begin_pass(0, 0, SAMPLES[:3], CPU)
        return layer(values * 1.0)

    assert torch.autograd.gradcheck(again, (values,))
    changed, by_torch = values.detach().clone(), values.detach().clone()
    result, of_torch = layer(changed), kind(p, inplace)(by_torch)
    assert (result.data_ptr() == changed.data_ptr()) == (of_torch.data_ptr() == by_torch.data_ptr())
    assert layer(values.detach().bfloat16()).dtype == torch.bfloat16


def test_draws_are_independent() -> None:
    """Of other samples, positions, layers, epochs and seeds; and each position, of all samples, has its share."""
    model = nn.Sequential(nn.Dropout(0.5))
    first, next_epoch, next_seed = (
        draws(model, 400, epoch=epoch, seed=seed) for epoch, seed in [(3, 0), (4, 0), (3, 1)]
    )
    on_pass(model, epoch=3)
    model(torch.ones(1000, 400))
    second = (model(torch.ones(1000, 400)) != 0).double()
    others = [second, next_epoch, next_seed, first.roll(1, 0), *(first.roll(by, 1) for by in (1, 2, 3, 4, 5, 8))]
    for other in others:
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / first.numel() ** 0.5
    for along in (0, 1):
        deviations = (first.sum(along) - first.shape[along] / 2) / (first.shape[along] / 4) ** 0.5
        number = deviations.numel()  # chi-square, with mean n and variance 2 n
        assert abs(deviations.square().sum() - number) < 5 * (2 * number) ** 0.5


class Own(nn.Dropout):
    """A user's class, which pickle finds here."""


class Doubling(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * input


@pytest.mark.parametrize("layer", [*(kind(0.3) for kind in KINDS), Own(0.3), StochasticDepth(0.3, "row")])
def test_a_layer_stays_what_it_is(layer: nn.Module) -> None:
    """Also when a model has it in several places. Copies draw as it does, and a file has torch's layer."""
    kind, names = type(layer), list(layer.state_dict())
    model = nn.Sequential(layer, nn.Sequential(layer))
    this_pass = on_pass(model)
    assert type(layer) is kind
    assert list(layer.state_dict()) == names
    assert set(vars(layer)) - set(vars(kind(0.3, "row") if kind is StochasticDepth else kind(0.3))) == {"forward"}
    dropped = model(torch.ones(1000, 3))
    this_pass.begin_pass(0, 0, SAMPLES, CPU)
    assert torch.equal(copy.deepcopy(model)(torch.ones(1000, 3)), dropped)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"flyte_ddp" not in file.getvalue()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(loaded[0]) is kind
    assert loaded[0].forward.__func__ is kind.forward
    on_pass(loaded)
    assert torch.equal(loaded(torch.ones(1000, 3)), dropped)
    layer.register_forward_hook(lambda *_: torch.zeros(()))
    assert layer(torch.ones(1000, 3)).item() == 0.0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_layers_with_another_forward_stay() -> None:
    patched = nn.Dropout(0.3)
    patched.forward = lambda values: 3 * values  # type: ignore[method-assign]
    scripted = torch.jit.script(nn.Dropout(1.0))
    model = nn.Sequential(Doubling(0.3), patched, StochasticDepth(0.5, "batch"), scripted)
    forwards = [layer.forward for layer in model]
    on_pass(model)
    assert [layer.forward for layer in model[:3]] == forwards[:3]
    assert model[3](torch.ones(1000, 3)).unique().tolist() == [0.0]


@pytest.fixture
def compiler():
    """Give torch's compiler, without what it has compiled in other tests."""
    from torch import _dynamo

    _dynamo.reset()
    yield _dynamo
    _dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_compiled_layers_draw_the_same_in_one_graph() -> None:
    """Those of each way of dropping, one of which is used twice; a break of the graph would be an error."""
    twice = nn.Dropout(0.2)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), layer) for layer in (twice, StochasticDepth(0.2, "row"))),
        *(nn.Linear(6, 6), twice),
    )
    this_pass = on_pass(model, SAMPLES[:8])
    values = torch.randn(8, 6)
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    for samples in (SAMPLES[:8], SAMPLES[5:9], SAMPLES[:6]):  # of other sizes, with the same code
        results = []
        for one in (model, compiled):
            this_pass.begin_pass(0, 1, samples, CPU)
            model.zero_grad()
            one(values[: len(samples)]).square().sum().backward()
            this_pass.finish_forward()
            this_pass.finish_pass()
            results.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(*results)
    assert not this_pass.model_draws


@pytest.mark.slow
@OF_THE_COMPILER
@pytest.mark.usefixtures("compiler")
def test_compiled_blocks_that_are_run_again_drop_the_same() -> None:
    torch.manual_seed(0)
    model = parallel_models.dropout_nested()
    this_pass = on_pass(model, SAMPLES[:8])
    values, gradients = torch.randn(8, 1, 8, 8), []
    for one in (model, torch.compile(model, backend="aot_eager_decomp_partition")):
        this_pass.begin_pass(0, 0, SAMPLES[:8], CPU)
        model.zero_grad()
        loss = one(values).square().sum()
        this_pass.finish_forward()
        loss.backward()
        this_pass.finish_pass()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@OF_THE_COMPILER
@pytest.mark.usefixtures("compiler")
def test_a_compiled_block_in_a_checkpoint_is_refused() -> None:
    """It would get other random numbers when it is run again."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 6))  # the last one needs what is dropped
    this_pass = on_pass(model, SAMPLES[:8])
    values = torch.randn(8, 6, requires_grad=True)
    loss = checkpoint(torch.compile(model, backend="eager"), values, use_reentrant=False).sum()
    this_pass.finish_forward()
    with pytest.raises(UserError, match="the backward pass runs compiled code with dropout again"):
        loss.backward()


@pytest.fixture
def on_cpu(compiler, monkeypatch: pytest.MonkeyPatch):
    """Give torch's compiler, with what dropout has compiled in other tests forgotten."""
    monkeypatch.setattr(dropout, "COMPILED", {})
    monkeypatch.setattr(dropout, "FAILED", set())
    return compiler


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def passes(layer: nn.Module, values: Tensor, fused_on: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the layer's output and its first and second gradient, and what autograd stores for them."""
    stored: list[Tensor] = []
    on_pass(nn.Sequential(layer), SAMPLES[: len(values)], fused_on=fused_on)
    values = values.detach().clone().requires_grad_()
    slopes = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view(values.shape).requires_grad_()
    changed = values * 1.0
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: stored.append(saved) or saved, lambda saved: saved):
        output = layer(changed)
    [gradient] = torch.autograd.grad(output, values, slopes, create_graph=True)
    [second] = torch.autograd.grad(gradient.mean(), slopes)  # an expanded gradient
    return [output.detach(), gradient.detach(), second], stored


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@OF_THE_COMPILER
@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (nn.Dropout(0.3), (3, 5, 7), torch.float32),
        (nn.Dropout2d(0.3), (3, 5, 2, 4), torch.bfloat16),
        (StochasticDepth(0.3, "row"), (3, 5, 7), torch.float64),
    ],
)
def test_a_compiled_kernel_drops_the_same(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As on a GPU: outputs, gradients and their gradients have the bits of the other way; stored are states only."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    layouts = [values] if len(shape) < 4 else [values, values.to(memory_format=torch.channels_last)]
    for one in layouts:
        (fused, stored), (expected, _) = passes(layer, one, "cpu"), passes(layer, one, "")
        assert len(dropout.COMPILED) >= 1
        for result, wanted in zip(fused, expected, strict=True):
            assert result.stride() == wanted.stride()
            assert torch.equal(bits_of(result), bits_of(wanted))
        assert [(saved.dtype, saved.shape) for saved in stored] == [(torch.int64, (3,))]


@pytest.mark.usefixtures("on_cpu")
def test_without_a_compiler_dropout_is_drawn_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one note, and one try; running out of memory is no failure of the compiler."""

    def fail(*_: object) -> None:
        tries.append(1)
        raise error

    tries: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    values, error = torch.randn(3, 5), torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        passes(nn.Dropout(0.3), values, "cpu")
    error = RuntimeError("Failed to find C compiler\nat many lines")
    with pytest.warns(UserWarning, match=r"RuntimeError: Failed to find C compiler\)") as noted:
        failed, _ = passes(nn.Dropout(0.3), values, "cpu")
    assert len({str(note.message) for note in noted}) == 1
    tried = len(tries)
    expected, _ = passes(nn.Dropout(0.3), values, "")
    for result, again, wanted in zip(failed, passes(nn.Dropout(0.3), values, "cpu")[0], expected, strict=True):
        assert torch.equal(result, wanted)
        assert torch.equal(again, wanted)
    assert len(tries) == tried
