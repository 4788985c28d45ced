"""What one rank's samples decide: the report says so, or several ranks are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_runs import train_in

from flyte_ddp import arrays
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.prepared_folder import write_prepared_set
from flyte_ddp.errors import UserError
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.text.json_lines import read_records

OWN = "test_rank_notes:"
HP = Hyperparameters(dataset="own:data", model=f"{OWN}plain", num_ranks=1, epochs=1, batch_size=8, precision="fp32")
pytestmark = pytest.mark.usefixtures("user_models")


def notes(folder: Path, **changes: Any) -> list[str]:
    """Train on rows of tokens, and return the notes of the report."""
    tokens = np.random.default_rng(3).integers(0, 5, (40, 4))
    classes = tokens[:, 0] % 3
    (folder / "data").mkdir()
    data = arrays((tokens[:30], classes[:30]), (tokens[30:], classes[30:]), name="own:data")
    write_prepared_set(data, folder / "data", {})
    result = train_in(folder / "run", replace(HP, **changes), folder / "data")
    found: list[str] = read_records(result.metrics)[-1]["notes"]
    return found


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3, **options), nn.Flatten(), nn.Linear(12, 3))


def plain() -> nn.Module:
    return embedding(padding_idx=0)


def by_frequency() -> nn.Module:
    return embedding(scale_grad_by_freq=True)


def limited() -> nn.Module:
    return embedding(max_norm=1.0)


class Centres(Classification):
    """Follows the mean outputs of each class, as a centre loss does."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.centres = nn.Linear(3, 3).requires_grad_(False)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        centres = self.centres.weight
        if torch.is_grad_enabled():
            centres.data[targets] = outputs.detach()
        return super().losses(outputs, targets) + functional.mse_loss(
            outputs, centres.to(outputs)[targets], reduction="none"
        ).mean(1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"model": f"{OWN}by_frequency"}, "0 goes by the samples of one rank (max_norm, scale_grad_by_freq)"),
        ({"model": f"{OWN}limited"}, "0 goes by the samples of one rank (max_norm, scale_grad_by_freq)"),
        ({"objective": f"{OWN}Centres"}, "The objective changes tensors that it holds"),
    ],
)
def test_the_report_says_that_the_number_of_ranks_decides(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = [note for note in notes(tmp_path, **changes) if "number of ranks" in note]
    assert (not said) if not words else len(said) == 1 and said[0].startswith(words)


@pytest.mark.slow
def test_ranks_whose_weights_would_differ_are_refused(tmp_path: Path) -> None:
    """Each would limit the norms of the rows that its samples use."""
    with pytest.raises(UserError, match=r"layer 0: max_norm=1 changes the rows .*; set num_ranks=1, or limit"):
        notes(tmp_path, model=f"{OWN}limited", num_ranks=2)
