"""Each objective on N ranks and in parts is a plain loop without padding, ranks or parts: in fp64, after each step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import leaf_tasks
import numpy as np
import objective_tasks
import pair_tasks
import pytest
import torch
from exact_steps import BASE, Steps, check_steps, step_in_ranks, step_plainly
from ranks import run_ranks
from states import make_state
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.loading import workers
from flyte_ddp.core.models.inputs import InputSpec
from flyte_ddp.core.order.augmentation import choose_mixup_partners, draw_mixup_shares
from flyte_ddp.core.order.sampling import Indices
from flyte_ddp.core.parallel.distributed import rank
from flyte_ddp.core.training import parts as loaded_parts
from flyte_ddp.core.training.evaluate import compute_split_columns, measure_split
from flyte_ddp.core.training.train import compute_gradients
from flyte_ddp.datasets import open_arrays, open_prepared
from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.datasets.prepared_set import write_prepared_set
from flyte_ddp.models import zoo
from flyte_ddp.plans.resolve import detect_hardware

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """A training, and what its steps are in a plain loop."""

    tasks: Any  # module with the data set
    data: str  # its name there
    hp: Hyperparameters
    plain: Callable[[Hyperparameters, Path], Steps]  # of the hyperparameters and the folder of the prepared data

    @property
    def folder(self) -> str:
        return f"{self.tasks.__name__}.{self.data}"

    def sized(self, batch_size: int, parts: int, mixup: float = 0.0) -> "Case":
        return self._replace(hp=replace(self.hp, batch_size=batch_size, accumulation_steps=parts, mixup=mixup))


FLAT, PIXELS = "objective_tasks:flat", "objective_tasks:pixels"
WEIGHTS = torch.tensor([0.5, 2.0, 3.25], dtype=torch.float64)
# What the loss of a whole batch of images is: the sum of the losses, and of the weights.
BatchLoss = Callable[[Any, Tensor], tuple[Tensor, Tensor | int]]


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


def of_pixels(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = (outputs["out"] if isinstance(outputs, dict) else outputs).permute(0, 2, 3, 1)
    counts = targets != 255
    return functional.cross_entropy(logits[counts], targets[counts].long(), reduction="sum"), counts.sum()


def of_weighted_pixels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = targets != 255
    classes = targets[counts].long()
    losses = functional.cross_entropy(outputs.permute(0, 2, 3, 1)[counts], classes, reduction="none")
    return (losses * WEIGHTS[classes]).sum(), WEIGHTS[classes].sum()


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


IMAGES: dict[str, tuple[str, dict[str, Any], BatchLoss]] = {
    "class weights and label smoothing": (
        "classes",
        {"model": FLAT, "class_weights": "0.5,2,3.25", "label_smoothing": 0.2},
        smoothed,
    ),
    "multilabel": ("labels", {"model": FLAT, "objective": "multilabel"}, binary),
    "own weights": ("labels", {"model": FLAT, "objective": "objective_tasks:Rare"}, rare),
    "regression": ("numbers", {"model": FLAT, "objective": "regression"}, squared),
    "segmentation": ("masks", {"model": "objective_tasks:InDict", "objective": "segmentation"}, of_pixels),
    "segmentation with class weights": (
        "masks",
        {"model": "objective_tasks:pixels", "objective": "segmentation", "class_weights": "0.5,2,3.25"},
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


def mixed_loss(
    hp: Hyperparameters, model: nn.Module, images: Tensor, targets: Tensor, batch: Any, step: int, loss_of: BatchLoss
) -> tuple[Tensor, Tensor]:
    """The loss of mixed images, sample by sample; of the library only the draws of partners and shares."""
    partners, shares = choose_mixup_partners(batch, hp.seed, step), draw_mixup_shares(batch, hp.mixup, hp.seed, step)
    total, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for sample, partner, share in zip(batch.tolist(), partners.tolist(), shares.tolist(), strict=True):
        outputs = model(share * images[[sample]] + (1 - share) * images[[partner]])
        for number, part in ((sample, share), (partner, 1 - share)):
            loss, of = loss_of(outputs, targets[[number]])
            total, weight = total + part * loss, weight + part * float(of)
    return total, weight


def plain_images(hp: Hyperparameters, folder: Path, loss_of: BatchLoss) -> Steps:
    """Of the library only the order of samples and the model."""
    arrays = open_arrays(folder)
    outputs = len(arrays.classes) or max(1, int(np.prod(arrays.train_targets.shape[1:])))
    images, tests = (
        (torch.tensor(np.array(part)).permute(0, 3, 1, 2).double() / 255 - arrays.mean[0]) / arrays.std[0]
        for part in (arrays.train_inputs, arrays.test_inputs)
    )
    targets, truths = (torch.tensor(np.array(part)) for part in (arrays.train_targets, arrays.test_targets))

    def make_model() -> nn.Module:
        spec, options = InputSpec(1, 8, 8, arrays.mean, arrays.std), hp.parse_options().get("model", {})
        return zoo.build_model(hp.model, outputs, spec, options)

    def loss_of_batch(model: nn.Module, batch: Indices, step: int) -> tuple[Tensor, Tensor | float]:
        if hp.mixup:
            return mixed_loss(hp, model, images, targets, batch, step, loss_of)
        return loss_of(model(images[batch]), targets[batch])

    return step_plainly(hp, make_model, loss_of_batch, lambda model: loss_of(model(tests), truths))


# The loss of one sample of which nothing is padded, and its weight; inputs and targets are of a batch of one.
SampleLoss = Callable[[nn.Module, Any, Any], tuple[Tensor, Tensor | float]]


def next_tokens(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
    counts = targets[0] != -100
    return functional.cross_entropy(logits[0, counts], targets[0, counts], reduction="sum"), counts.sum()


def read(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return next_tokens(model(tokens), targets)


def read_shifted(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return next_tokens(model(tokens)[:, :-1], targets[:, 1:])


def squared(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, float]:
    found = model(**inputs)[0, 0]
    return (0 * found, 0.0) if targets.isnan() else ((found - targets[0].double()) ** 2, 1.0)


def both(model: nn.Module, inputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    amount, logits = model(*inputs)
    weight = targets["kind"][0]
    loss = (amount[0] - targets["amount"][0]) ** 2 + functional.cross_entropy(logits, targets["kind"])
    return weight * loss, weight


def classify(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, float]:
    logits = model(**inputs, mask=torch.ones_like(inputs["tokens"], dtype=torch.bool))
    return functional.cross_entropy(logits, targets), 1.0


LANGUAGE = {"objective": "language", "collate": "padded"}
REVIEWS = {"model": "leaf_tasks:Bag"}
# The data set, the hyperparameters, and the loss of a sample.
LEAVES: dict[str, tuple[str, dict[str, Any], SampleLoss]] = {
    "texts": ("texts", {**LANGUAGE, "model": "leaf_tasks:Reader"}, read),
    "shift": (
        "whole_texts",
        {**LANGUAGE, "model": "leaf_tasks:Reader", "options": '{"objective": {"shift": true}}'},
        read_shifted,
    ),
    "logits in a dict": (
        "texts",
        {**LANGUAGE, "model": "leaf_tasks:Reader", "options": '{"model": {"form": "dict"}}'},
        read,
    ),
    "dict": ("table", {"objective": "regression", "model": "leaf_tasks:Tabular"}, squared),
    "tuple": ("pairs", {"objective": "leaf_tasks:NumberAndClass", "model": "leaf_tasks:TwoInputs"}, both),
    "own collate": ("reviews", {**REVIEWS, "collate": "leaf_tasks:to_multiples_of_four"}, classify),
    "on demand": ("reviews_on_demand", {**REVIEWS, "collate": "leaf_tasks:to_multiples_of_four"}, classify),
}


def take(leaves: Any, sample: int) -> Any:
    """Return a sample's leaves as a batch of one, floats in fp64."""
    if isinstance(leaves, dict):
        return {name: take(leaf, sample) for name, leaf in leaves.items()}
    if isinstance(leaves, tuple):
        return tuple(take(leaf, sample) for leaf in leaves)
    values = torch.from_numpy(np.array(leaves[sample]))[None]
    return values.double() if values.is_floating_point() else values


def plain_leaves(hp: Hyperparameters, _: Path, data: str, loss_of: SampleLoss) -> Steps:
    """Each sample by itself, so that nothing is padded; of the library only the order of samples and the arrays."""
    arrays = getattr(leaf_tasks, data.removesuffix("_on_demand"))("")
    model_of: Callable[..., nn.Module] = getattr(leaf_tasks, hp.model.partition(":")[2])
    given = {
        "Reader": {"num_classes": leaf_tasks.TOKENS, **hp.parse_options().get("model", {})},
        "Tabular": {"num_classes": 1, "input_shape": {"numbers": (4,), "kind": ()}},
        "Bag": {"num_classes": 3},
    }

    def sum_up(model: nn.Module, side: str, samples: Any) -> tuple[Tensor, float]:
        leaves = [getattr(arrays, f"{side}_{kind}") for kind in ("inputs", "targets")]
        found = [loss_of(model, *(take(each, sample) for each in leaves)) for sample in samples]
        return sum((loss for loss, _ in found), torch.zeros(())), sum(float(weight) for _, weight in found)

    return step_plainly(
        hp,
        lambda: model_of(**given.get(model_of.__name__, {})),
        lambda model, batch, _: sum_up(model, "train", batch.tolist()),
        lambda model: sum_up(model, "test", range(leaf_tasks.TEST)),
    )


def of_pairs(model: nn.Module, views: list[Tensor]) -> tuple[Tensor, int]:
    """The loss of Radford et al., "Learning transferable visual models from natural language supervision", 2021."""
    image, text, scale = model(*views)
    logits = scale * image @ text.T
    places = torch.arange(len(image))
    both = functional.cross_entropy(logits, places) + functional.cross_entropy(logits.T, places)
    return len(image) * both / 2, len(image)


def plain_pairs(hp: Hyperparameters, _: Path) -> Steps:
    data = pair_tasks.pairs("")
    train, test = ([torch.tensor(view).double() for view in part] for part in (data.train_inputs, data.test_inputs))

    def of_tests(model: nn.Module) -> tuple[Tensor, int]:
        """An evaluation's batches, of 5, are compared each by itself."""
        parts = [of_pairs(model, [view[start : start + 5] for view in test]) for start in range(0, len(test[0]), 5)]
        return sum((loss for loss, _ in parts), torch.zeros(())), len(test[0])

    return step_plainly(
        hp, pair_tasks.Towers, lambda model, batch, _: of_pairs(model, [v[batch] for v in train]), of_tests
    )


PAIRS = replace(BASE, dataset="pair_tasks:pairs", model="pair_tasks:Towers", objective="pair_tasks:Contrastive")
MIXED = ("class weights and label smoothing", "multilabel")
IN_TWOS = ("texts", "multilabel")  # whose steps may have no target at all


def list_cases() -> dict[str, Case]:
    """Return each case in three parts, some in batches of two, and some with mixup."""
    found = {}
    for name, (data, values, loss) in IMAGES.items():
        found[name] = Case(objective_tasks, data, replace(BASE, **values), partial(plain_images, loss_of=loss))
    for name, (data, values, sample_loss) in LEAVES.items():
        hp = replace(BASE, dataset=f"leaf_tasks:{data}", **values)
        found[name] = Case(leaf_tasks, data, hp, partial(plain_leaves, data=data, loss_of=sample_loss))
    pairs = Case(pair_tasks, "pairs", PAIRS, plain_pairs)
    return {
        **{name: case.sized(8, 3) for name, case in found.items()},
        **{f"{name} in twos": found[name].sized(2, 2) for name in IN_TWOS},
        **{f"{name} mixed": found[name].sized(8, 3, 0.4) for name in MIXED},
        **{f"pairs {size}": pairs.sized(size, 1) for size in (8, 3)},
    }


def evaluate_recall(folder: Path) -> float:
    """Return the recall of the model's first weights over the whole test split, in batches of 5."""
    state = make_state(PAIRS, replace(detect_hardware(PAIRS), threads=1), open_prepared(folder / "pair_tasks.pairs"))
    with state.evaluation_mode():
        columns = compute_split_columns(state.predict, state.test, 5, state.objective)
        return measure_split(state.objective, columns).measures["recall_at_1"]


def train_in_ranks(folder: Path) -> None:
    workers.POSSIBLE = False  # loader processes take a second to start, and test_items.py has them
    step_in_ranks(folder, [(name, case.folder, case.hp) for name, case in list_cases().items()])
    recall = evaluate_recall(folder)
    if rank() == 0:
        (folder / "recall").write_text(repr(recall))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data sets."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, case in {case.folder: case for case in list_cases().values()}.items():
        data = case.data
        (folder / name).mkdir()
        if data.endswith("on_demand"):
            sizes = leaf_tasks.TRAIN, leaf_tasks.TEST
            prepared = OnDemandSet(f"leaf_tasks:{data}", "", *sizes, ("low", "middle", "high"), "")
            write_prepared_set(prepared, folder / name, {"data_source": ""})
        else:
            write_prepared_set(getattr(case.tasks, data)(""), folder / name, {})
    return folder


@pytest.mark.usefixtures("user_models")
def test_every_step_is_that_of_one_process(folder: Path) -> None:
    """Also where a rank, a part or a whole step has no target, and where the last batch is ragged."""
    plain, done = {}, dict[Any, Steps]()
    for name, case in list_cases().items():
        key = repr(case.plain), case.hp.model, case.hp.batch_size, case.hp.mixup  # parts and collate change nothing
        if key not in done:
            done[key] = case.plain(case.hp, folder / case.folder)
        plain[name] = done[key]
    assert run_ranks(train_in_ranks, folder, 2) == [0, 0]
    check_steps(folder, plain)
    for name in IN_TWOS:
        assert 0.0 in plain[f"{name} in twos"][0], "some step has no target at all"
    check_recall(folder)


def check_recall(folder: Path) -> None:
    torch.manual_seed(BASE.seed)
    views = pair_tasks.pairs("").test_inputs
    images, texts, _ = pair_tasks.Towers().double()(*(torch.tensor(view).double() for view in views))
    right = [int((images[place] * texts).sum(1).argmax()) == place for place in range(len(texts))]
    assert 0 < sum(right) < len(right)
    assert float((folder / "recall").read_text()) == pytest.approx(np.mean(right), abs=1e-12)


@pytest.mark.parametrize(("name", "exchanges"), [("own function", 0), ("texts", 1)])
@pytest.mark.usefixtures("user_models")
def test_a_step_exchanges_one_number_for_weights_and_none_without(
    name: str, exchanges: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch/torchtitan#2850, #4099: counting the targets of a step costs exchanges, or waits for the device."""
    case = list_cases()[name]
    hp = replace(case.hp, num_ranks=1, accumulation_steps=3, batch_size=9)
    state = make_state(hp, detect_hardware(hp), open_prepared(folder / case.folder))
    exchanged: list[Tensor] = []
    monkeypatch.setattr(loaded_parts, "sum_over_ranks", lambda number: exchanged.append(number) or number)
    compute_gradients(state, np.arange(9))
    assert [tuple(number.shape) for number in exchanged] == [()] * exchanges
