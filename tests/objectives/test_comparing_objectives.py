"""Losses that compare the samples of a batch: what ranks exchange, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pair_tasks as tasks
import pytest
import torch
from exact_steps import BASE
from ranks import run_ranks
from training_runs import train_on

from flyte_ddp import across_ranks
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.parallel.distributed import rank
from flyte_ddp.core.parallel.exchange import RankExchange

OWN = "test_comparing_objectives:"
PAIRS = replace(BASE, dataset="pair_tasks:pairs", model="pair_tasks:Towers", objective="pair_tasks:Contrastive")


def gather_in_ranks(folder: Path) -> None:
    """Leave what each of 3 ranks gets of 2, 3 and 0 rows: the last has no samples, and runs the first one."""
    own = rank()
    rows = (torch.arange(5.0)[:, None] * torch.ones(1, 2)).split([2, 3, 0])[own] if own < 2 else torch.zeros(1, 2)
    rows.requires_grad_()
    exchange = RankExchange()
    with exchange.enable_across_ranks(has_samples=own < 2):
        found, places = across_ranks(rows)
        kinds = [across_ranks(rows[:, 0].detach().to(kind))[0] for kind in (torch.bool, torch.int64, torch.bfloat16)]
        (found**2 * (own + 1)).sum().backward()
        with pytest.raises(
            UserError, match=r"the ranks' values have shapes \[2, 4\], \[3, 5\], \[0, 6\]: must be equal"
        ):
            across_ranks(torch.zeros(len(rows), own + 4))
    with pytest.raises(UserError, match="across_ranks: must be called in an objective's losses"):
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

    compares_samples = False


COMPARES = "the objective compares the samples of a batch, and a micro-batch would have fewer samples"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation_steps": 2}, f"accumulation_steps=2: {COMPARES}; set accumulation_steps=1"),
        ({"accumulation_steps": 2, "objective": f"{OWN}Undeclared"}, f"accumulation_steps=2: {COMPARES}"),
        ({"mixup": 0.2}, r"mixup=0\.2: the objective compares samples, .*; set mixup=0"),
        ({"mixup": 0.2, "objective": f"{OWN}Undeclared"}, r"mixup=0\.2: .*a mixture is two samples"),
    ],
)
@pytest.mark.usefixtures("user_models")
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """huggingface/sentence-transformers#1822, luyug/GradCache#7: accumulation loses negatives."""
    with pytest.raises(UserError, match=words):
        train_on(tmp_path, tasks.pairs(""), replace(PAIRS, num_ranks=1, **changes))
