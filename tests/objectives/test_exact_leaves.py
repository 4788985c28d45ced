"""Texts, series and tables on N ranks and in parts are a plain loop over single samples: in fp64, after each step."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import leaf_tasks as tasks
import numpy as np
import pytest
import torch
from cli import HELPERS
from exact_steps import BASE, SIZES, STRATEGIES, Steps, check_steps, step_in_ranks, step_plainly
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.datasets.prepared_folder import write_prepared_set
from flyte_ddp.datasets.sample_arrays import Ragged, SampleArrays
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.loading import workers
from flyte_ddp.parallel.distributed import rank, world_size
from flyte_ddp.training import parts as loaded_parts
from flyte_ddp.training.evaluate import evaluate_split
from flyte_ddp.training.train import compute_gradients
from flyte_ddp.training.training_state import TrainingState

pytestmark = pytest.mark.slow

# The loss of one sample, of which nothing is padded, and its weight; inputs and targets are of a batch of one.
Loss = Callable[[nn.Module, Any, Any], tuple[Tensor, Tensor | float]]


def next_tokens(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    outputs = outputs if isinstance(outputs, Tensor) else outputs[0] if isinstance(outputs, tuple) else outputs
    logits = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
    counts = targets[0] != -100
    return functional.cross_entropy(logits[0, counts], targets[0, counts], reduction="sum"), counts.sum()


def read(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return next_tokens(model(tokens), targets)


def read_shifted(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return next_tokens(model(tokens)[:, :-1], targets[:, 1:])


def follow(model: nn.Module, values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    known = ~targets[0].isnan()
    apart = model(values, torch.ones(values.shape[:2]))[0, known] - targets[0, known]
    weights = (1 + targets[0, known].float().abs()).double()  # as the objective computes them, in the targets' type
    return (weights * apart**2).sum(), weights.sum()


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
CASES: dict[str, tuple[str, dict[str, Any], Loss]] = {
    "texts": ("texts", {**LANGUAGE, "model": "leaf_tasks:Reader"}, read),
    "shift": (
        "whole_texts",
        {**LANGUAGE, "model": "leaf_tasks:Reader", "options": '{"objective": {"shift": true}}'},
        read_shifted,
    ),
    "rows of tokens": ("rows_of_tokens", {"objective": "language", "model": "leaf_tasks:Reader"}, read),
    **{
        f"logits in {form}": (
            "texts",
            {**LANGUAGE, "model": "leaf_tasks:Reader", "options": f'{{"model": {{"form": "{form}"}}}}'},
            read,
        )
        for form in tasks.FORMS
        if form != "tensor"
    },
    "own weights of series": (
        "series",
        {"objective": "leaf_tasks:LargeCountMore", "collate": "padded", "model": "leaf_tasks:Follower"},
        follow,
    ),
    "dict": ("table", {"objective": "regression", "model": "leaf_tasks:Tabular"}, squared),
    "tuple": ("pairs", {"objective": "leaf_tasks:NumberAndClass", "model": "leaf_tasks:TwoInputs"}, both),
    "padded by keyword": ("reviews", {**REVIEWS, "collate": "padded"}, classify),
    "own collate": ("reviews", {**REVIEWS, "collate": "leaf_tasks:to_multiples_of_four"}, classify),
    "on demand": ("reviews_on_demand", {**REVIEWS, "collate": "leaf_tasks:to_multiples_of_four"}, classify),
}


def cases(*, every: bool) -> Iterator[tuple[str, str, Hyperparameters, Loss]]:
    """Each case in three parts, and texts in batches of two; or ``every`` case in all sizes."""
    some = [(name, (8, 3)) for name in CASES] + [("texts", (2, 2))]
    for name, (batch_size, parts) in itertools.product(CASES, (*SIZES, (8, 2), (8, 4))) if every else some:
        data, values, loss = CASES[name]
        sizes_of_batch = {"batch_size": batch_size, "accumulation_steps": parts}
        hp = replace(BASE, dataset=f"leaf_tasks:{data}", **sizes_of_batch, **values)
        yield f"{name}-{batch_size}-{parts}", data, hp, loss


TEST_SAMPLES = (1, 2, 4, 5, 6, 23)  # in batches of 5 on 3 ranks


def leave_evaluations(folder: Path) -> None:
    """Leave, from rank 0, evaluations of texts on some of the test samples."""
    data, values, _ = CASES["texts"]
    hp = replace(BASE, dataset=f"leaf_tasks:{data}", num_ranks=world_size(), **values)
    whole, found = tasks.texts(""), {}
    for samples in TEST_SAMPLES:
        ends = whole.test_inputs.ends[:samples]
        inputs, targets = (Ragged(leaf.values[: ends[-1]], ends) for leaf in (whole.test_inputs, whole.test_targets))
        cut = replace(whole, test_inputs=inputs, test_targets=targets)
        state = TrainingState(hp, replace(detect_hardware(hp), threads=1), cut, None)
        with state.evaluation_mode():
            evaluation = evaluate_split(state.predict, state.test, 5, state.device, state.objective)
        found[samples] = vars(evaluation)
    if rank() == 0:
        torch.save(found, folder / f"evaluations-{world_size()}.pt")


def train_some(folder: Path) -> None:
    leave_evaluations(folder)
    train_in_ranks(folder, STRATEGIES[3][:1], every=False)


def train_all(folder: Path) -> None:
    train_in_ranks(folder, STRATEGIES[torch.distributed.get_world_size()], every=True)


def train_in_ranks(folder: Path, strategies: tuple[str, ...], *, every: bool) -> None:
    workers.POSSIBLE = False  # loader processes take a second to start, and test_own_items.py has them
    step_in_ranks(folder, [(name, data, hp) for name, data, hp, _ in cases(every=every)], strategies)


def take(leaves: Any, sample: int) -> Any:
    """Return a sample's leaves as a batch of one, floats in fp64."""
    if isinstance(leaves, dict):
        return {name: take(leaf, sample) for name, leaf in leaves.items()}
    if isinstance(leaves, tuple):
        return tuple(take(leaf, sample) for leaf in leaves)
    values = torch.from_numpy(np.array(leaves[sample]))[None]
    return values.double() if values.is_floating_point() else values


def plain_loop(hp: Hyperparameters, data: SampleArrays, loss_of: Loss) -> Steps:
    """Each sample by itself, so that nothing is padded; of the library only the order of samples and the arrays."""
    model_of: Callable[..., nn.Module] = getattr(tasks, hp.model.partition(":")[2])
    given = {
        "Reader": {"num_classes": tasks.TOKENS, **hp.parse_options().get("model", {})},
        "Tabular": {"num_classes": 1, "input_shape": {"numbers": (4,), "kind": ()}},
        "Bag": {"num_classes": 3},
    }

    def sum_up(model: nn.Module, side: str, samples: Any) -> tuple[Tensor, float]:
        leaves = [getattr(data, f"{side}_{kind}") for kind in ("inputs", "targets")]
        found = [loss_of(model, *(take(each, sample) for each in leaves)) for sample in samples]
        return sum((loss for loss, _ in found), torch.zeros(())), sum(float(weight) for _, weight in found)

    return step_plainly(
        hp,
        lambda: model_of(**given.get(model_of.__name__, {})),
        lambda model, batch, _: sum_up(model, "train", batch.tolist()),
        lambda model: sum_up(model, "test", range(tasks.TEST)),
    )


def plain_steps(*, every: bool) -> dict[str, Steps]:
    """What the plain loop gives for each case; for cases of the same loss and model only once."""
    found: dict[Any, Steps] = {}
    steps = {}
    for name, data, hp, loss in cases(every=every):
        key = loss, hp.model, data.removesuffix("_on_demand"), hp.batch_size
        if key not in found:
            found[key] = plain_loop(hp, getattr(tasks, key[2])(""), loss)
        steps[name] = found[key]
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data sets."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in {data for data, *_ in CASES.values()}:
        (folder / name).mkdir()
        if name.endswith("on_demand"):
            data = OnDemandSet(f"leaf_tasks:{name}", "", tasks.TRAIN, tasks.TEST, ("low", "middle", "high"), "")
            write_prepared_set(data, folder / name, {"data_source": ""})
        else:
            write_prepared_set(getattr(tasks, name)(""), folder / name, {})
    return folder


def test_every_step_is_that_of_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 3 ranks, also where a rank, a part or a whole step has no target, and where the last batch is ragged.

    huggingface/transformers#34191, meta-pytorch/torchtune#1875: a mean of means of accumulated parts.
    huggingface/transformers#34242, #37474, #608: tokens are not averaged over devices.
    huggingface/transformers#46204: the count has places that the shifted loss drops; a text of one token counts 0.
    mosaicml/composer#3273, #3677: padding, then prompts, are counted.
    mosaicml/composer#3682, pytorch/pytorch#70348: NaN of a part without any target.
    pytorch/torchtitan#2206, #1759: the validation loss is divided by the accumulation steps.
    Lightning-AI/pytorch-lightning#10349, #3668, #10093: the batch size is guessed from nested batches.
    pytorch/pytorch#33148, #38174, Lightning-AI/pytorch-lightning#20404: uneven inputs hang.
    pytorch/pytorch#19354, #124666: outputs in dicts, tuples, dataclasses and objects.
    """
    monkeypatch.chdir(HELPERS)
    plain = plain_steps(every=False)
    assert run_ranks(train_some, folder, 3) == [0, 0, 0]
    check_steps(folder, plain, STRATEGIES[3][:1])
    assert 0.0 in plain["texts-2-2"][0], "some step has no target at all"
    check_evaluations(folder)


def check_evaluations(folder: Path) -> None:
    """Each sample counts once and in its place, and figures of three ranks are those of one to the last bit.

    pytorch/pytorch#25162, Lightning-AI/pytorch-lightning#7929, #5060, roboflow/rf-detr#1507: some count twice.
    huggingface/accelerate#226, #575, #952, #2007: the last batch is lost or repeated.
    """
    leave_evaluations(folder)
    of_one, of_three = (torch.load(folder / f"evaluations-{ranks}.pt") for ranks in (1, 3))
    targets = tasks.texts("").test_targets
    for samples in TEST_SAMPLES:
        one, three = (found[samples] for found in (of_one, of_three))
        assert one["measures"].keys() == three["measures"].keys() == {"loss", "perplexity", "token_accuracy"}
        np.testing.assert_array_equal([*one["measures"].values()], [*three["measures"].values()])
        tokens = [float((targets[sample] != -100).sum()) for sample in range(samples)]
        assert one["columns"]["weight"].tolist() == tokens
        for name, column in one["columns"].items():
            assert torch.equal(column, three["columns"][name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_step_with_all_strategies_and_parts(ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with 1 to 4 parts."""
    monkeypatch.chdir(HELPERS)
    assert run_ranks(train_all, folder, ranks) == [0] * ranks
    check_steps(folder, plain_steps(every=True), STRATEGIES[ranks])


@pytest.mark.parametrize(("name", "exchanges"), [("padded by keyword", 0), ("texts", 1), ("tuple", 1)])
@pytest.mark.usefixtures("user_models")
def test_a_step_exchanges_one_number_for_weights_and_none_without(
    name: str, exchanges: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch/torchtitan#2850, #4099: counting tokens costs exchanges, or waits for the device."""
    data, values, _ = CASES[name]
    hp = replace(BASE, num_ranks=1, dataset=f"leaf_tasks:{data}", accumulation_steps=3, batch_size=9, **values)
    state = TrainingState(hp, detect_hardware(hp), open_prepared(folder / data), None)
    exchanged: list[Tensor] = []
    monkeypatch.setattr(loaded_parts, "sum_over_ranks", lambda number: exchanged.append(number) or number)
    compute_gradients(state, np.arange(9))
    assert [tuple(number.shape) for number in exchanged] == [()] * exchanges
