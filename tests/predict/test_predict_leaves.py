"""Predictions of texts: a dict in another order of names, tokens that the model has no row for, empty texts."""

from pathlib import Path
from typing import Any

import leaf_models
import numpy as np
import pytest
import torch
from leaf_models import TOKENS, save_untrained
from predictions import predict_rows
from torch import Tensor, nn
from training_runs import QUIET

from flyte_ddp import arrays
from flyte_ddp.core.models.inputs import LeafSpec, LeavesSpec
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.prepared_set import Opening, write_prepared_set
from flyte_ddp.datasets.sample_arrays import SampleArrays

TEXTS = [[1, 2, 3], [4], [5, 6]]


def data_set(**inputs: Any) -> SampleArrays:
    side = inputs, [0, 1, 2]
    return arrays(side, side)


def predict(files: tuple[Path, Path], data: SampleArrays, folder: Path) -> list[dict[str, str]]:
    (folder / "data").mkdir(parents=True)
    write_prepared_set(data, folder / "data", {})
    return predict_rows(*files, folder / "out.csv", dataset=folder / "data", settings=QUIET)


class Masked(nn.Module):
    """Takes the mask of the leaf that was first in training."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Embedding(TOKENS, 6), nn.Linear(7, 3)

    def forward(self, tokens: Tensor, marks: Tensor, mask: Tensor) -> Tensor:
        inner = (self.tokens(tokens) * mask[..., None]).sum(1)
        return self.last(torch.cat([inner, marks.sum(1, keepdim=True)], 1))


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of this module is found where the others are."""
    monkeypatch.setattr(leaf_models, "Masked", Masked, raising=False)


def test_inputs_of_a_dict_are_taken_by_name(tmp_path: Path) -> None:
    """Also the mask, which is that of the first of different lengths in the training's order."""
    marks = [[1.0], [2.0, 3.0, 4.0, 5.0], [6.0]]
    module, files = save_untrained(tmp_path, Masked, data_set(tokens=TEXTS, marks=marks), collate="padded")
    found = predict(files, data_set(marks=marks, tokens=TEXTS), tmp_path / "other")
    for row, text, mark in zip(found, TEXTS, marks, strict=True):
        alone = module(torch.tensor([text]), torch.tensor([mark]), torch.ones(1, len(text), dtype=torch.bool))
        scores = [float(row[f"score_{number}"]) for number in range(3)]
        np.testing.assert_allclose(scores, alone.softmax(1)[0].tolist(), rtol=1e-5)


def test_the_mask_is_of_the_input_that_had_lengths_in_training() -> None:
    """A single new row has one length only, and its numbers come first."""
    like = LeavesSpec("dict", (("numbers", LeafSpec((2,), "float")), ("words", LeafSpec((None,), "int64"))))
    side = {"numbers": np.ones((1, 2)), "words": [[4, 5, 6]]}, None
    split, _ = arrays(side, side).open_test_split(
        Opening(torch.device("cpu"), Settings(loaders=1), like, collate="padded")
    )
    assert split.load_batch(np.array([0])).inputs["mask"].shape == (1, 3)
