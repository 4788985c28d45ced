"""A new kind of data set is a class and an entry in the table of kinds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flyte_ddp import catalog
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import SampleArrays, fetch, fingerprint, open_prepared
from flyte_ddp.plans.identity import run_name
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware


@dataclass(frozen=True)
class Numbers:
    """The definition of ``numbers:END``."""

    dataset: str

    def fingerprint(self, source: str) -> str:
        return f"numbers{source}"

    def load(self, *_: Any) -> tuple[SampleArrays, str]:
        values = np.arange(int(self.dataset.partition(":")[2]), dtype=np.float32)
        return NumbersSet(self.dataset, values[:, None], values, values[:, None], values), "memory"


class NumbersSet(SampleArrays):
    """The numbers from 0 to END."""

    @classmethod
    def define(cls, dataset: str, test_dataset: str, *, decoded_by_user: bool) -> Numbers:
        assert (test_dataset, decoded_by_user) == ("", False)
        return Numbers(dataset)


def test_a_new_kind_is_a_class_and_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.WITH_ADDRESS, "numbers", catalog.DataKind(f"{__name__}:NumbersSet", "numbers"))
    hp = Hyperparameters(dataset="numbers:40", model="torchvision_free:Model", objective="regression", batch_size=4)
    assert hp.list_user_callables() == ("torchvision_free:Model",)
    assert fingerprint(hp.dataset, "") == "numbers"
    opened = open_prepared(fetch(hp.dataset, "", tmp_path / "data", progress="off"))
    assert type(opened) is NumbersSet
    splits = OpenedData(hp, opened).open_splits(detect_hardware(hp), torch.device("cpu"), Settings())
    assert (len(splits.training), len(splits.validation), len(splits.test)) == (36, 4, 40)
    assert splits.test.load_batch(np.arange(3)).targets.tolist() == [0, 1, 2]
    monkeypatch.setattr("flyte_ddp.plans.identity.model_identity", lambda _: {})
    assert run_name(hp, "numbers").startswith("numbers.40-torchvision_free.Model-")
