"""Trainings on sets on demand: on several ranks, cut off and resumed, with failing items, and what they leave."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded_runs import quiet
from predictions import predict_rows
from training_runs import cut_off, losses, train_in, weights

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.progress import Progress
from flyte_ddp.datasets import fetch, fingerprint
from flyte_ddp.datasets.custom import CustomSet
from flyte_ddp.run import Result

pytestmark = pytest.mark.usefixtures("user_models")

HP = Hyperparameters(
    dataset="item_sets:drawing", model="item_sets:Model", collate="padded", augment="item_sets:add_noise", epochs=2,
    batch_size=9, num_ranks=2, precision="fp64", log_interval=1, learning_rate=0.05, sampling="weighted",
)  # fmt: skip
STACKED = {"collate": "stacked", "augment": "none", "num_ranks": 1, "epochs": 1}


def train(hp: Hyperparameters, folder: Path, **settings: Any) -> Result:
    data = fetch(hp.dataset, "", folder.parent / f"{hp.dataset.partition(':')[2]}-data", progress="off")
    return train_in(folder, hp, data, quiet(folder, **settings))


@pytest.mark.slow
def test_results_do_not_depend_on_ranks_processes_and_interruptions(tmp_path: Path) -> None:
    """Cut off in the second epoch, of four steps each, and resumed bit for bit with another number of processes.

    Lightning-AI/pytorch-lightning#19764, #18780, #19367, #13316, huggingface/accelerate#2016,
    huggingface/transformers#40691, modelscope/ms-swift#10050, NVIDIA-NeMo/Megatron-Bridge#4565.
    albumentations-team/albumentations#2559: the draws of a transform's own generator after a resume.
    """
    hp = replace(HP, num_ranks=1)
    one = train(hp, tmp_path / "one", loaders=3)
    assert losses(train(HP, tmp_path / "two", loaders=1)) == pytest.approx(losses(one), abs=1e-9)
    cut_off(lambda: train(hp, tmp_path / "cut", loaders=1), len(losses(one)) - 1)
    resumed = train(hp, tmp_path / "cut", loaders=2)
    found = weights(resumed)
    assert all(torch.equal(value, found[name]) for name, value in weights(one).items())


def test_the_digest_of_a_set_on_demand_changes_with_what_is_known_of_it(tmp_path, monkeypatch) -> None:
    """Its code, its source, its lengths, its classes and weights."""
    module, source = tmp_path / "mine.py", tmp_path / "source"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = (
        "from flyte_ddp import on_demand\nclass Named(list): sample_weights = [1, 2]\n"
        "def made(source): return on_demand(Named([(1.0, 0), (2.0, 1)]), [(1.0, 0)], classes='ab')\n"
    )
    digests = []
    for text, content in itertools.product((code, code.replace("2.0", "3.0")), ("one", "two")):
        module.write_text(text)
        source.write_text(content)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        digests.append(CustomSet("mine:made").load(str(source), tmp_path, Progress("off"))[0].digest)
    made = __import__("mine")
    one = [(1.0, 0)]
    for data in (made.on_demand(one, one), made.on_demand(one, one * 2), made.on_demand(one, one, classes="ab")):
        monkeypatch.setattr(made, "made", lambda _, data=data: data)
        digests.append(CustomSet("mine:made").load(str(source), tmp_path, Progress("off"))[0].digest)
    assert len({*digests}) == 7
    assert fingerprint("mine:made", str(source)) == fingerprint("mine:made", str(source))


@pytest.mark.slow
def test_predictions_are_in_the_order_of_the_set(tmp_path: Path) -> None:
    """Of samples of different lengths: huggingface/transformers#33728, fastai/fastai#975."""
    result = train(replace(HP, epochs=1, num_ranks=1, test_batch_size=4), tmp_path / "run")
    options = {"dataset": tmp_path / "drawing-data", "settings": quiet(tmp_path)}
    rows = predict_rows(result.model, result.sidecar, tmp_path / "table.csv", **options)
    assert [row["id"] for row in rows] == [*map(str, range(9))]
    assert [row["truth"] for row in rows] == ["abc"[number % 3] for number in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (STACKED, "collate='stacked': the inputs of dataset='item_sets:drawing' have different lengths; set 'padded'"),
        ({"model": "item_sets:Deaf"}, "forward does not accept .*a dict with mask, row, drawn, tokens: "),
        ({"mixup": 0.2}, "mixup=0.2: the inputs are .* and only floats of one shape can be mixed"),
        ({"sampling": "balanced"}, "sampling='balanced': .*one class per sample"),
    ],
)
def test_what_does_not_fit_a_set_on_demand_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        train(replace(HP, **{"num_ranks": 1, **changes}), tmp_path / "run")
    assert len(caught.value.message) < 350
