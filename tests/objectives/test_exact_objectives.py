"""Each objective on N ranks and in parts is a plain loop over whole batches: in fp64, after each step."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import objective_tasks as tasks
import pytest
import torch
from cli import HELPERS
from exact_steps import BASE, SIZES, STRATEGIES, Steps, check_steps, step_in_ranks, step_plainly
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from training_runs import train_in

from flyte_ddp import machine
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import ImageArrays, open_arrays
from flyte_ddp.datasets.prepared_folder import write_prepared_set
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.models import zoo
from flyte_ddp.models.images import InputSpec
from flyte_ddp.order import sampling
from flyte_ddp.order.mixing import choose_partners, draw_shares
from flyte_ddp.training import parts as loaded_parts
from flyte_ddp.training.train import compute_gradients
from flyte_ddp.training.training_state import TrainingState

pytestmark = pytest.mark.slow

FLAT, PIXELS = "objective_tasks:flat", "objective_tasks:pixels"
WEIGHTS = torch.tensor([0.5, 2.0, 3.25], dtype=torch.float64)
# The data set, the hyperparameters, and what the loss of a whole batch is: the sum of the losses, and of the weights.
Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor | int]]


def binary(outputs: Tensor, targets: Tensor, weights: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    known = ~targets.isnan()
    losses = functional.binary_cross_entropy_with_logits(
        outputs, targets.nan_to_num(nan=0.5).double(), reduction="none"
    )
    used = known * weights
    return (losses * used)[known].sum(), used.sum()


def squared(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    known = ~targets.isnan()
    return ((outputs[known] - targets[known].double()) ** 2).sum(), known.sum()


def huber(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return functional.huber_loss(outputs[:, 0], targets.double(), reduction="sum"), len(targets)


def of_pixels(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = (outputs["out"] if isinstance(outputs, dict) else outputs).permute(0, 2, 3, 1)
    counts = targets != 255
    return functional.cross_entropy(logits[counts], targets[counts].long(), reduction="sum"), counts.sum()


def of_weighted_pixels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets != 255
    classes = targets[counts].long()
    losses = functional.cross_entropy(outputs.permute(0, 2, 3, 1)[counts], classes, reduction="none")
    return (losses * WEIGHTS[classes]).sum(), WEIGHTS[classes].sum()


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own weighted mean, times its weight."""
    total = WEIGHTS[targets].sum()
    return functional.cross_entropy(outputs, targets, weight=WEIGHTS) * total, total


def smoothed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same with smoothing, which is for training alone."""
    total = WEIGHTS[targets].sum()
    smoothing = 0.2 if torch.is_grad_enabled() else 0.0
    return functional.cross_entropy(outputs, targets, weight=WEIGHTS, label_smoothing=smoothing) * total, total


def with_hidden(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
    hidden, _ = outputs.hidden
    return functional.cross_entropy(outputs.logits, targets, reduction="sum") + (hidden**2).sum() / 5, len(targets)


def rare(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return binary(outputs, targets, torch.where(targets == 1, 10.0, 1.0))


def focal(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    logs = outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return (-((1 - logs.exp()) ** 3) * logs).sum(), len(targets)


CASES: dict[str, tuple[str, dict[str, Any], Loss]] = {
    "class weights": ("classes", {"model": FLAT, "class_weights": "0.5,2,3.25"}, weighted),
    "class weights and label smoothing": (
        "classes",
        {"model": FLAT, "class_weights": "0.5,2,3.25", "label_smoothing": 0.2},
        smoothed,
    ),
    "multilabel": ("labels", {"model": FLAT, "objective": "multilabel"}, binary),
    "own weights": ("labels", {"model": FLAT, "objective": "objective_tasks:Rare"}, rare),
    "regression": ("numbers", {"model": FLAT, "objective": "regression"}, squared),
    "huber": (
        "number",
        {
            "model": FLAT,
            "objective": "regression",
            "options": '{"objective": {"loss": "huber"}, "model": {"width": 3}}',
        },
        huber,
    ),
    "segmentation": ("masks", {"model": "objective_tasks:InDict", "objective": "segmentation"}, of_pixels),
    "segmentation with class weights": (
        "masks",
        {"model": PIXELS, "objective": "segmentation", "class_weights": "0.5,2,3.25"},
        of_weighted_pixels,
    ),
    "outputs in a dataclass": (
        "classes",
        {"model": "objective_tasks:TwoHeads", "objective": "objective_tasks:SmallHidden"},
        with_hidden,
    ),
    "own function": (
        "classes",
        {"model": FLAT, "objective": "objective_tasks:focal", "options": '{"objective": {"gamma": 3}}'},
        focal,
    ),
}
MIXED = {
    name: (data, {**values, "mixup": 0.4}, loss)
    for name, (data, values, loss) in CASES.items()
    if name in ("class weights", "class weights and label smoothing", "own function", "multilabel", "segmentation")
}


def cases() -> Iterator[tuple[str, str, Hyperparameters, Loss]]:
    for (name, (data, values, loss)), (batch_size, parts) in itertools.product(CASES.items(), SIZES):
        hp = replace(BASE, batch_size=batch_size, accumulation_steps=parts, **values)
        yield f"{name}-{batch_size}-{parts}", data, hp, loss
    for name, (data, values, loss) in MIXED.items():
        yield f"{name}-mixed", data, replace(BASE, batch_size=8, accumulation_steps=3, **values), loss


def train_in_ranks(folder: Path) -> None:
    named = ((name, data, hp) for name, data, hp, _ in cases())
    step_in_ranks(folder, [*named], STRATEGIES[torch.distributed.get_world_size()])


def mixed_loss(
    hp: Hyperparameters, model: nn.Module, images: Tensor, targets: Tensor, batch: Any, step: int, loss_of: Loss
) -> tuple[Tensor, Tensor]:
    """The loss of mixed images, sample by sample; of the library only the draws of partners and shares."""
    partners, shares = choose_partners(batch, hp.seed, step), draw_shares(batch, hp.mixup, hp.seed, step)
    total, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample, partner, share in zip(batch.tolist(), partners.tolist(), shares.tolist(), strict=True):
        outputs = model(share * images[[sample]] + (1 - share) * images[[partner]])
        for number, part in ((sample, share), (partner, 1 - share)):
            loss, of = loss_of(outputs, targets[[number]])
            total, weight = total + part * loss, weight + part * float(of)
    return total, weight


def plain_loop(hp: Hyperparameters, arrays: ImageArrays, loss_of: Loss) -> Steps:
    """Of the library only the order of samples and the model."""
    outputs = len(arrays.classes) or max(1, int(np.prod(arrays.train_labels.shape[1:])))
    images, tests = (
        (torch.tensor(np.array(part)).permute(0, 3, 1, 2).double() / 255 - arrays.mean[0]) / arrays.std[0]
        for part in (arrays.train_images, arrays.test_images)
    )
    targets, truths = (torch.tensor(np.array(part)) for part in (arrays.train_labels, arrays.test_labels))

    def make_model() -> nn.Module:
        spec, options = InputSpec(1, 8, 8, arrays.mean, arrays.std), hp.parse_options().get("model", {})
        return zoo.build_model(hp.model, outputs, spec, options)

    def loss_of_batch(model: nn.Module, batch: sampling.Indices, step: int) -> tuple[Tensor, Tensor | float]:
        if hp.mixup:
            return mixed_loss(hp, model, images, targets, batch, step, loss_of)
        return loss_of(model(images[batch]), targets[batch])

    return step_plainly(hp, make_model, loss_of_batch, lambda model: loss_of(model(tests), truths))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Steps]]:
    """The folder of the data sets, and of each case what the plain loop gives."""
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HELPERS)
        for name in {data for data, *_ in CASES.values()}:
            (folder / name).mkdir()
            write_prepared_set(getattr(tasks, name)(""), folder / name, {})
        return folder, {name: plain_loop(hp, open_arrays(folder / data), loss) for name, data, hp, loss in cases()}


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 2, 4))])
def test_every_step_is_that_of_one_process(
    ranks: int, expected: tuple[Path, dict[str, Steps]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank, a part or a whole step has no target at all, and where the last batch is ragged.

    huggingface/transformers#34191, #34242, meta-pytorch/torchtune#1875, pytorch/torchtitan#2206: a mean of means of
    parts or ranks with different numbers of targets.
    mosaicml/composer#3682, pytorch/pytorch#70348: NaN of a part without any target.
    pytorch/torchtitan#1759: the validation loss is divided by the accumulation steps.
    pytorch/pytorch#31579, open-mmlab/mmsegmentation#578, #1409: ignored pixels weigh ranks wrongly.
    pytorch/pytorch#72047, #65329, #8062: class weights are averaged over parts.
    pytorch/pytorch#33148, #38174, Lightning-AI/pytorch-lightning#20404: uneven inputs hang.
    pytorch/pytorch#19354, #124666: outputs in dicts, tuples and dataclasses.
    huggingface/transformers#30633, JDAI-CV/fast-reid#178, pytorch/pytorch#45325: a head that the loss does not use.
    """
    folder, plain = expected
    monkeypatch.chdir(HELPERS)
    assert run_ranks(train_in_ranks, folder, ranks) == [0] * ranks
    check_steps(folder, plain, STRATEGIES[ranks])
    assert 0.0 in plain["multilabel-2-2"][0], "some step has no target at all"


@pytest.mark.parametrize(("name", "exchanges"), [("own function", 0), ("class weights", 1), ("segmentation", 1)])
@pytest.mark.usefixtures("user_models")
def test_a_step_exchanges_one_number_for_weights_and_none_without(
    name: str, exchanges: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch/torchtitan#2850, #4099: counting the targets of a step costs exchanges, or waits for the device."""
    data, values, _ = CASES[name]
    write_prepared_set(getattr(tasks, data)(""), tmp_path, {})
    hp = replace(BASE, num_ranks=1, accumulation_steps=3, batch_size=9, **values)
    state = TrainingState(hp, detect_hardware(hp), open_arrays(tmp_path), None)
    exchanged: list[Tensor] = []
    monkeypatch.setattr(loaded_parts, "sum_over_ranks", lambda number: exchanged.append(number) or number)
    compute_gradients(state, np.arange(9))
    assert [tuple(number.shape) for number in exchanged] == [()] * exchanges


@pytest.mark.usefixtures("user_models")
def test_outputs_in_a_dataclass_come_through_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, which losses and measures must not see, and to the check of the saved model, which compares outputs."""
    monkeypatch.setattr(machine, "bf16_support", lambda _: machine.Bf16.SLOWER)  # torch emulates it
    (tmp_path / "data").mkdir()
    data, values, _ = CASES["outputs in a dataclass"]
    write_prepared_set(getattr(tasks, data)(""), tmp_path / "data", {})
    hp = replace(BASE, num_ranks=1, precision="bf16", **values)
    assert train_in(tmp_path / "run", hp, tmp_path / "data").model.exists()
