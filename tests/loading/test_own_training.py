"""Trainings whose samples a user's own functions decode and augment, on several ranks, cut off, with damaged data."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from traceback import format_exception

import numpy as np
import pytest
import torch
from cli import HELPERS
from encoded_runs import BASE, SIDE, quiet, train
from image_folders import stored
from PIL import Image
from predictions import predict_rows
from served_shards import contents
from tars import npy_bytes, shard_bytes
from training_runs import Train, notes, train_in

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import RankError, UserError
from flyte_ddp.core.loading.split import Splits
from flyte_ddp.core.training.objective_setup import build_objective
from flyte_ddp.datasets import fetch, open_prepared
from flyte_ddp.plans.opened_data import OpenedData
from flyte_ddp.plans.resolve import detect_hardware, resolve
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release.evaluation import evaluate_split
from flyte_ddp.shards.scanning import create_index

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("user_models")]

ARRAYS = Hyperparameters(
    model="faults:model", epochs=1, batch_size=300, precision="fp64", num_ranks=1, log_interval=1, learning_rate=0.05,
)  # fmt: skip
LABELS = ["left", "bright"]


def png_of(pixels: np.ndarray) -> bytes:
    return stored(Image.fromarray(pixels), "PNG")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with an image, a mask and labels in each sample, and no class; images of many sizes."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for shard in range(4):
        members = {}
        for sample in range(20):
            height, width = random.integers(20, 40, 2)
            pixels = random.integers(0, 80, (height, width, 3), dtype=np.uint8)
            left = bool(random.integers(0, 2))
            bright = not left  # so that each sample has one label
            half = np.s_[:, : width // 2] if left else np.s_[:, width // 2 :]
            pixels[half] += np.uint8(150 if bright else 90)
            mask = np.zeros((height, width), np.uint8)
            mask[half] = 1
            labels = json.dumps({"labels": [left, bright]}).encode()
            members[f"{shard}/{sample:02d}"] = {".png": png_of(pixels), ".json": labels, ".npy": npy_bytes(mask)}
        (folder / f"train-{shard}.tar").write_bytes(shard_bytes(members))
    create_index([f"{folder}/train-{{0..3}}.tar"], folder / "train.json", classes=LABELS, progress="off")
    return folder


@pytest.fixture
def train_digits(digits: Path, tmp_path: Path) -> Train:
    """Return a function that trains on the digits' arrays in a folder of this name, with changes of quiet settings."""
    return lambda hp, name="run", **changes: train_in(tmp_path / name, hp, digits, **changes)


def open_all(hp: Hyperparameters, folder: Path, workers: int = 2) -> Splits:
    data = fetch(hp.dataset, "", folder / "data", sample=hp.sample, progress="off")
    opened = OpenedData(hp, open_prepared(data))
    return opened.open_splits(detect_hardware(hp), torch.device("cpu"), quiet(folder, loaders=workers))


def test_masks_are_cropped_and_mirrored_with_their_images(photos: Path, tmp_path: Path, monkeypatch) -> None:
    """Where the mask is 1 the image is bright, in the middle parts of evaluations as in random parts."""
    monkeypatch.chdir(HELPERS)
    hp = replace(BASE, dataset=f"shards:{photos}/train.json", sample="own_loading:with_mask", augment="resized_crop")
    splits = open_all(hp, tmp_path)
    try:
        assert splits.targets is not None
        assert splits.targets.shape == (SIDE, SIDE)
        samples = splits.training.order.samples_at(slice(0, 40))
        middle, *random = (splits.training.load_batch(samples, epoch) for epoch in (None, 0, 0, 1))
        assert torch.equal(random[0].inputs, random[1].inputs)
        assert torch.equal(random[0].targets, random[1].targets)
        assert not torch.equal(random[0].inputs, random[2].inputs)
        for images, masks, names in (middle, random[0]):
            assert images.shape == (40, SIDE, SIDE, 3)
            assert masks.dtype == torch.uint8
            found = images.double().mean(-1) > 85  # 0 to 80, and 90 more in the mask's half
            agreeing = (found == masks).double().mean((1, 2))
            assert agreeing.median() > 0.9
            assert len({*names}) == 40
    finally:
        splits.close()


def test_draws_of_own_decoding_and_augmentation_do_not_depend_on_processes(photos: Path, tmp_path: Path) -> None:
    hp = replace(
        BASE, dataset=f"shards:{photos}/train.json", sample="own_loading:noisy", image_size=8,
        augment="own_loading:torchvision_pipeline",
    )  # fmt: skip

    def load(hp: Hyperparameters, workers: int) -> torch.Tensor:
        with closing(open_all(hp, tmp_path, workers)) as splits:
            return splits.training.load_batch(splits.training.order.samples_at(slice(0, 20)), 1).inputs

    one, several = load(hp, 1), load(hp, 3)
    assert torch.equal(one, several)
    assert not torch.equal(one, load(replace(hp, augment="none"), 1))


def test_labels_out_of_json(photos: Path, tmp_path: Path) -> None:
    hp = replace(BASE, dataset=f"shards:{photos}/train.json", sample="own_loading:members", objective="multilabel")
    splits = open_all(hp, tmp_path)
    objective = build_objective(
        resolve(hp), OpenedData(hp, open_prepared(tmp_path / "data")), splits.training.order, splits.targets
    )
    assert (objective.facts.target_shape, objective.facts.classes) == ((2,), (*LABELS,))
    found = splits.test.load_batch(splits.test.order.samples_at(slice(0, 8)))
    expected = [json.loads(sample[".json"])["labels"] for sample in contents(photos / "train.json")]
    assert found.targets.dtype == torch.float32
    tests = splits.test.order.samples_at(slice(0, 8))
    assert found.targets.tolist() == [expected[sample] for sample in tests.tolist()]
    splits.close()


def test_targets_of_own_code_are_what_the_objective_takes(photos: Path, tmp_path: Path) -> None:
    """Else a cross-entropy would be minimised towards labels that are neither 0 nor 1."""
    hp = replace(
        BASE,
        dataset=f"shards:{photos}/train.json",
        sample="own_loading:half_labels",
        objective="multilabel",
        model="faults:model",
    )
    with pytest.raises(UserError, match=r"made for sample '.+': .*the target at \[\d\] is 0\.5: must"):
        train(hp, tmp_path)


def test_a_model_predicts_what_it_was_trained_on(photos: Path, tmp_path: Path) -> None:
    """Its evaluation by the table of predictions is that of the training."""
    hp = replace(
        BASE, dataset=f"shards:{photos}/train.json", sample="own_loading:members", objective="multilabel",
        model="faults:model", batch_size=20, image_size=8, precision="fp32",
    )  # fmt: skip
    result = train(hp, tmp_path / "trained")
    [data] = (tmp_path / "trained").glob("shards-*")
    files = result.model, result.sidecar
    rows = predict_rows(*files, tmp_path / "table.csv", dataset=data, settings=quiet(tmp_path))
    assert len(rows) == 8  # a tenth of 80
    model_of_run = SavedModel(*files, quiet(tmp_path))
    found = evaluate_split(model_of_run, open_prepared(data))
    expected = json.loads(result.sidecar.read_text())["metrics"]
    assert found.measures
    for name, value in found.measures.items():
        assert value == pytest.approx(expected[f"test_{name}"], abs=1e-6, nan_ok=True)
    inputs, classes = torch.zeros(2, 3, 8, 8), [*model_of_run.classes]
    outputs = model_of_run.compute_outputs(inputs)
    for _ in range(2):  # the same order again, and the first again
        model_of_run.set_class_order([*reversed(classes)])
        assert torch.equal(model_of_run.compute_outputs(inputs), outputs.flip(1))
    model_of_run.set_class_order(classes)
    assert torch.equal(model_of_run.compute_outputs(inputs), outputs)


def test_an_error_of_own_code_reaches_the_user(train_digits: Train) -> None:
    text = r"UserCodeError: augment='own_loading:fail' on sample \d+: ZeroDivisionError: the augmentation's own words"
    with pytest.raises(RankError, match=text) as raised:
        train_digits(replace(ARRAYS, augment="own_loading:fail"))
    assert 'raise ZeroDivisionError("the augmentation\'s own words")' in "".join(format_exception(raised.value))


def test_undecodable_samples_are_replaced(photos: Path, tmp_path: Path) -> None:
    """Found by loader processes, and told once; without bad_samples the user's own error is told."""
    members = {
        f"{sample:02d}": {".png": b"no image" if sample in (3, 40) else png_of(np.full((9, 9, 3), sample, np.uint8)),
                          ".json": b'{"labels": [0, 1]}'}
        for sample in range(60)
    }  # fmt: skip
    (tmp_path / "train.tar").write_bytes(shard_bytes(members))
    create_index([f"{tmp_path}/train.tar"], tmp_path / "train.json", classes=LABELS, progress="off")
    hp = replace(
        BASE, dataset=f"shards:{tmp_path}/train.json", sample="own_loading:class_of", batch_size=20,
        model="faults:model", image_size=8, bad_samples=2, epochs=1,
    )  # fmt: skip
    result = train(hp, tmp_path / "out", quiet(tmp_path, loaders=2))
    assert any("2 samples could not be decoded and were replaced" in note for note in notes(result))
    with pytest.raises(RankError, match="UnidentifiedImageError: cannot identify") as raised:
        train(replace(hp, bad_samples=0), tmp_path / "none")
    assert "sample='own_loading:class_of' on sample '" in str(raised.value)
    assert "in class_of" in "".join(format_exception(raised.value))
