"""Losses that compare the samples of a batch, and losses of several terms: on N ranks and in parts as on one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pair_tasks as tasks
import pytest
import torch
from cli import HELPERS
from exact_steps import BASE, STRATEGIES, Steps, check_steps, step_in_ranks, step_plainly
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional
from training_runs import train_in

from flyte_ddp import across_ranks
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets import open_prepared
from flyte_ddp.datasets.prepared_folder import write_prepared_set
from flyte_ddp.errors import UserError
from flyte_ddp.hardware import detect_hardware
from flyte_ddp.objectives import Objective
from flyte_ddp.order.mixing import choose_partners, draw_shares
from flyte_ddp.order.sampling import Indices
from flyte_ddp.parallel.distributed import rank
from flyte_ddp.parallel.exchange import RankExchange
from flyte_ddp.training.evaluate import evaluate_split
from flyte_ddp.training.training_state import TrainingState

OWN = "test_comparing_objectives:"
PAIRS = replace(BASE, dataset="pair_tasks:pairs", model="pair_tasks:Towers", objective="pair_tasks:Contrastive")
TERMS = replace(BASE, dataset="pair_tasks:two_terms", model="pair_tasks:TwoHeads", objective="pair_tasks:TwoTerms")
# 41 samples leave a last batch of 1 or 2, so that ranks have none.
CASES = {
    "pairs 8": replace(PAIRS, batch_size=8),
    "pairs 3": replace(PAIRS, batch_size=3),
    "terms 8-1": replace(TERMS, batch_size=8),
    "terms 8-3": replace(TERMS, batch_size=8, accumulation_steps=3),
    "terms 2-2": replace(TERMS, batch_size=2, accumulation_steps=2),
    "terms mixed": replace(TERMS, batch_size=8, accumulation_steps=3, mixup=0.4),
}


def train_in_ranks(folder: Path) -> None:
    cases = [(name, hp.dataset.partition(":")[2], hp) for name, hp in CASES.items()]
    step_in_ranks(folder, cases, STRATEGIES[torch.distributed.get_world_size()])
    recall = evaluate_recall(folder / "pairs")
    if rank() == 0:
        (folder / "recall").write_text(repr(recall))


def evaluate_recall(data: Path) -> float:
    """Return the recall of the model's first weights over the whole test split, in batches of 5."""
    state = TrainingState(PAIRS, replace(detect_hardware(PAIRS), threads=1), open_prepared(data), None)
    with state.evaluation_mode():
        return evaluate_split(state.predict, state.test, 5, state.device, state.objective).measures["recall_at_1"]


def of_pairs(model: nn.Module, views: list[Tensor]) -> tuple[Tensor, int]:
    """The loss of Radford et al., "Learning transferable visual models from natural language supervision", 2021."""
    image, text, scale = model(*views)
    logits = scale * image @ text.T
    places = torch.arange(len(image))
    both = functional.cross_entropy(logits, places) + functional.cross_entropy(logits.T, places)
    return len(image) * both / 2, len(image)


def plain_pairs(hp: Hyperparameters) -> Steps:
    data = tasks.pairs("")
    train, test = ([torch.tensor(view).double() for view in part] for part in (data.train_inputs, data.test_inputs))

    def of_tests(model: nn.Module) -> tuple[Tensor, int]:
        """An evaluation's batches, of 5, are compared each by itself."""
        parts = [of_pairs(model, [view[start : start + 5] for view in test]) for start in range(0, len(test[0]), 5)]
        return sum((loss for loss, _ in parts), torch.zeros(())), len(test[0])

    return step_plainly(hp, tasks.Towers, lambda model, batch, _: of_pairs(model, [v[batch] for v in train]), of_tests)


def mean_of_terms(outputs: dict[str, Tensor], targets: dict[str, Tensor], shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of losses and of weights, [2] each: tokens, numbers; each sample counts by its share."""
    # Also a term without weight gives gradients, of 0, as on any number of ranks: momentum and decay go on.
    sums = torch.stack([0 * outputs["logits"].sum(), 0 * outputs["number"].sum()])
    weights = torch.zeros(2, dtype=torch.float64)
    for sample, share in enumerate(shares.tolist()):
        logs = outputs["logits"][sample].log_softmax(1)
        found = [-logs[place, token] for place, token in enumerate(targets["tokens"][sample].tolist()) if token >= 0]
        number = targets["numbers"][sample].double()
        if found:
            sums = sums + share * torch.stack([torch.stack(found).sum(), logs.new_zeros(())])
            weights[0] += share * len(found)
        if not number.isnan():
            error = (outputs["number"][sample] - number).abs()
            sums = sums + 2 * share * torch.stack([logs.new_zeros(()), error])
            weights[1] += 2 * share
    return sums, weights


def plain_terms(hp: Hyperparameters) -> Steps:
    data = tasks.two_terms("")
    inputs, tests = (torch.tensor(part).double() for part in (data.train_inputs, data.test_inputs))
    targets, truths = (
        {name: torch.tensor(each) for name, each in part.items()} for part in (data.train_targets, data.test_targets)
    )

    def divide(sums: Tensor, weights: Tensor) -> tuple[Tensor, float]:
        return sum((total / weight for total, weight in zip(sums, weights, strict=True) if weight), 0 * sums.sum()), 1.0

    def of_batch(model: nn.Module, batch: Indices, step: int) -> tuple[Tensor, float]:
        chosen, own = [batch], [torch.ones(len(batch))]
        mixed = inputs[batch]
        if hp.mixup:
            drawn = torch.from_numpy(draw_shares(batch, hp.mixup, hp.seed, step))
            chosen, own = [batch, choose_partners(batch, hp.seed, step)], [drawn, 1 - drawn]
            mixed = sum(share[:, None] * inputs[samples] for samples, share in zip(chosen, own, strict=True))
        outputs = model(mixed)
        parts = [
            mean_of_terms(outputs, {name: each[samples] for name, each in targets.items()}, share)
            for samples, share in zip(chosen, own, strict=True)
        ]
        return divide(sum(part[0] for part in parts), sum(part[1] for part in parts))

    def of_tests(model: nn.Module) -> tuple[Tensor, float]:
        return divide(*mean_of_terms(model(tests), truths, torch.ones(len(tests))))

    return step_plainly(hp, tasks.TwoHeads, of_batch, of_tests)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Steps]]:
    """The folder of the data sets, and what the plain loops give."""
    folder = tmp_path_factory.mktemp("pairs")
    for name in ("pairs", "two_terms"):
        (folder / name).mkdir()
        write_prepared_set(getattr(tasks, name)(""), folder / name, {})
    return folder, {name: (plain_pairs if "pairs" in name else plain_terms)(hp) for name, hp in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 2, 4))])
def test_every_step_is_that_of_one_process(
    ranks: int, expected: tuple[Path, dict[str, Steps]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank has no sample, where the last batch is ragged, and where a term has no weight.

    mlfoundations/open_clip#616, #894, lightly-ai/lightly#1977, ShiqiYu/OpenGait#36, huggingface/accelerate#76,
    KevinMusgrave/pytorch-metric-learning#363: gathers without gradients, or gradients off by the number of ranks.
    unslothai/unsloth-zoo#832: a token mean and a pair mean under one count.
    """
    folder, plain = expected
    monkeypatch.chdir(HELPERS)
    assert run_ranks(train_in_ranks, folder, ranks) == [0] * ranks
    check_steps(folder, plain, STRATEGIES[ranks])
    assert 0.0 in plain["terms 2-2"][0], "some step has no weight at all"
    torch.manual_seed(BASE.seed)
    views = tasks.pairs("").test_inputs
    images, texts, _ = tasks.Towers().double()(*(torch.tensor(view).double() for view in views))
    right = [int((images[place] * texts).sum(1).argmax()) == place for place in range(len(texts))]
    assert 0 < sum(right) < len(right)
    assert float((folder / "recall").read_text()) == pytest.approx(np.mean(right), abs=1e-12)


def gather_in_ranks(folder: Path) -> None:
    """Leave what each of 3 ranks gets of 2, 3 and 0 rows: the last has no samples, and runs the first one."""
    own = rank()
    rows = (torch.arange(5.0)[:, None] * torch.ones(1, 2)).split([2, 3, 0])[own] if own < 2 else torch.zeros(1, 2)
    rows.requires_grad_()
    exchange = RankExchange()
    with exchange.during_losses(has_samples=own < 2):
        found, places = across_ranks(rows)
        kinds = [across_ranks(rows[:, 0].detach().to(kind))[0] for kind in (torch.bool, torch.int64, torch.bfloat16)]
        (found**2 * (own + 1)).sum().backward()
        with pytest.raises(
            UserError, match=r"the ranks' values have shapes \[2, 4\], \[3, 5\], \[0, 6\]: must be equal"
        ):
            across_ranks(torch.zeros(len(rows), own + 4))
    with pytest.raises(UserError, match="was called outside an objective's losses"):
        across_ranks(rows)
    with torch.no_grad():
        alone, own_places = across_ranks(rows)
    assert alone is rows
    assert own_places.tolist() == [*range(len(rows))]
    torch.save((found.tolist(), places.tolist(), rows.grad, [kind.tolist() for kind in kinds]), folder / f"{own}.pt")


@pytest.mark.slow
def test_rows_and_gradients_go_across_ranks(tmp_path: Path) -> None:
    """Rows of any type come in the batch's order; each has the gradients of all ranks' losses."""
    assert run_ranks(gather_in_ranks, tmp_path, 3) == [0, 0, 0]
    rows = torch.arange(5.0)[:, None] * torch.ones(1, 2)
    of_all = 2 * rows * (1 + 2 + 3)
    for number, (places, gradient) in enumerate([([0, 1], of_all[:2]), ([2, 3, 4], of_all[2:]), ([0], rows[:1] * 0)]):
        found, own, own_gradient, kinds = torch.load(tmp_path / f"{number}.pt")
        assert (found, own) == (rows.tolist(), places)
        torch.testing.assert_close(own_gradient, gradient)
        assert kinds == [[False, True, True, True, True], [*range(5)], [0.0, 1.0, 2.0, 3.0, 4.0]]


class Undeclared(tasks.Contrastive):
    """Compares samples, and does not say so before training."""

    coupled = False


class Flat(Objective):
    """Gives a single number to compare."""

    def losses(self, outputs: Any, targets: None) -> Tensor:
        return across_ranks(outputs[2])[0]


class OneDict(tasks.TwoTerms):
    """Weighs terms that it does not tell apart."""

    def losses(self, outputs: Any, targets: Any) -> Any:
        return super().losses(outputs, targets)["numbers"]


class Unweighted(Objective):
    """Has terms without weights."""

    losses = tasks.TwoTerms.losses  # type: ignore[assignment]


class Negative(tasks.TwoTerms):
    """Has a term with weights below 0."""

    def weights(self, targets: Any) -> Any:
        return {"tokens": super().weights(targets)["tokens"], "numbers": -1 + 0 * targets["numbers"].nan_to_num()}


COMPARES = "the objective compares the samples of a batch, and each part would have fewer to compare"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation_steps": 2}, f"accumulation_steps=2: {COMPARES}; set accumulation_steps=1"),
        ({"accumulation_steps": 2, "objective": f"{OWN}Undeclared"}, f"accumulation_steps=2: {COMPARES}"),
        ({"mixup": 0.2}, r"mixup=0\.2: the objective compares samples, .*; set mixup=0"),
        ({"mixup": 0.2, "objective": f"{OWN}Undeclared"}, "and a mixture would be two at once"),
        ({"objective": f"{OWN}Flat"}, "got a single number; give a tensor with a row for each sample"),
    ],
)
@pytest.mark.usefixtures("user_models")
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """huggingface/sentence-transformers#1822, luyug/GradCache#7: accumulation loses negatives."""
    with pytest.raises(UserError, match=words):
        train(tmp_path, replace(PAIRS, num_ranks=1, **changes))


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (
            "OneDict",
            "losses have the terms none, and its weights tokens, numbers: return dicts with the same names",
        ),
        ("Unweighted", "the objective's losses have the terms tokens, numbers, and its weights none: return dicts"),
        ("Negative", "the objective's weights go from -1 to -1: must be finite and at least 0"),
    ],
)
@pytest.mark.usefixtures("user_models")
def test_wrong_terms_are_refused(objective: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(tmp_path, replace(TERMS, num_ranks=1, objective=f"{OWN}{objective}"))


def train(folder: Path, hp: Hyperparameters) -> None:
    (folder / "data").mkdir()
    write_prepared_set(getattr(tasks, hp.dataset.partition(":")[2])(""), folder / "data", {})
    train_in(folder / "run", hp, folder / "data")
