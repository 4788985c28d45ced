"""Drift: how often unchanged and changed windows are reported as moved.

Pictures are FashionMNIST's 10,000 test images, with a small CNN of one epoch. Tables and texts are generated, with a
linear model and a mean of embeddings. Each repetition draws another reference of 5,000 held-out samples and another
window from the rest. A window has moved if any column has moved. An alarm needs two of three windows, so alarms are
rarer.

Pictures get a Gaussian blur of one pixel, 20 % less brightness, or JPEG of quality 10. They may also miss a class, or
have a tenth of the samples from scikit-learn's digits. In tables a column is half a deviation higher, or a fifth of
the rows has a new category. Texts are twice as long. Only the CNN depends on the machine.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.measuring import Options, Result, Target
from flyte_ddp import Hyperparameters, arrays, fetch, on_demand, run_training
from flyte_ddp.core.models.inputs import prepare_inputs
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets import open_arrays
from flyte_ddp.monitor.compare import ALPHA, FLOOR, SAMPLES, compare_columns
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.predict.sample_columns import (
    REFERENCE_SAMPLES,
    SampleColumns,
    compute_sample_columns,
    draw_random_samples,
    join_columns,
)

SIZES, TESTED = (200, 2000, 20_000), 2000
POOL, TRAINED = 60_000, 2000  # drawn rows and texts
NUMBERS, CATEGORIES, TOKENS, LONGEST = 8, 5, 500, 30
BATCH = 500
QUIET = Settings(progress="off", wandb_mode="disabled")
Rows = NDArray[Any]


class Change(NamedTuple):
    samples: SampleColumns  # that have changed
    share: float = 1.0  # of a window


class Population(NamedTuple):
    same: SampleColumns
    changes: dict[str, Change]


def measure(options: Options) -> Result:
    windows = options.number(1000, 10)
    settings = {"windows": windows, "alpha": ALPHA, "floor": FLOOR, "reference": REFERENCE_SAMPLES, "compared": SAMPLES}
    result = Result(settings=settings)
    random = np.random.default_rng(0)
    limit = ALPHA + 3 * (ALPHA * (1 - ALPHA) / windows) ** 0.5
    for name, make in {"pictures": make_pictures, "table": make_table, "texts": make_texts}.items():
        found = make(options)
        for size in SIZES:
            if size + REFERENCE_SAMPLES <= count(found.same):
                share = moved_share(random, found.same, None, size, windows)
                what = f"{name}, unchanged, {size:,} samples: moved"
                result.targets.append(Target(what, share, "%", at_most=limit))
        for change, samples in found.changes.items():
            for size in (SIZES[0], TESTED):
                share = moved_share(random, found.same, samples, size, max(1, windows // 10))
                at_least = 0.9 if size == TESTED else None
                what = f"{name}, {change}, {size:,} samples: moved"
                result.targets.append(Target(what, share, "%", at_least=at_least))
        options.keep(result)
    return result


def moved_share(
    random: np.random.Generator, same: SampleColumns, change: Change | None, size: int, windows: int
) -> float:
    moved = 0
    for _ in range(windows):
        order = random.permutation(count(same))
        reference = take(same, order[:REFERENCE_SAMPLES])
        window = take(same, order[REFERENCE_SAMPLES : REFERENCE_SAMPLES + size])
        if change is not None:
            others = round(size * change.share)
            chosen = random.choice(count(change.samples), others, replace=others > count(change.samples))
            window = join_columns([take(window, np.arange(others, size)), take(change.samples, chosen)])
        drawn = draw_random_samples(window, SAMPLES, int(random.integers(2**32)))
        moved += any(column.moved for column in compare_columns(reference, drawn))
    return moved / windows


def count(columns: SampleColumns) -> int:
    return len(next(iter(columns.values())))


def take(columns: SampleColumns, places: Rows) -> SampleColumns:
    return {name: values[places] for name, values in columns.items()}


def train(options: Options, **values: Any) -> tuple[SavedModel, Path]:
    hp = Hyperparameters(num_ranks=1, epochs=1, eval_interval=1000, **values)
    folder = options.folder / hp.dataset.replace(":", "-")
    data = fetch(hp.dataset, "", folder / "data", progress="off")
    found = run_training(hp, data, folder / "run", QUIET)
    return SavedModel(found.model, found.sidecar, QUIET), data


def describe(model: SavedModel, samples: Rows, prepare: Callable[[Any], Any]) -> SampleColumns:
    parts = []
    for start in range(0, len(samples), BATCH):
        inputs = prepare(samples[start : start + BATCH])
        parts.append(compute_sample_columns(model, inputs, model.compute_outputs(inputs)))
    return join_columns(parts)


def make_pictures(options: Options) -> Population:
    model, data = train(options, dataset="fashion_mnist")
    split = open_arrays(data)
    images, classes = np.array(split.test_inputs)[..., 0], np.array(split.test_targets)

    def described(pictures: Rows) -> SampleColumns:
        return describe(model, pictures, lambda part: prepare_inputs(torch.from_numpy(part[..., None]), model.spec))

    def changed(change: Callable[[Image.Image], Image.Image]) -> Change:
        return Change(described(np.stack([np.array(change(Image.fromarray(each))) for each in images])))

    same = described(images)
    digits = np.stack(
        [np.array(Image.fromarray((each * 15.9).astype(np.uint8)).resize((28, 28))) for each in load_digits().images]
    )
    changes = {
        "blur": changed(lambda image: image.filter(ImageFilter.GaussianBlur(1))),
        "brightness": changed(lambda image: image.point(lambda value: value * 0.8)),
        "JPEG": changed(compress),
        "a missing class": Change(take(same, np.flatnonzero(classes != 0))),
        "a tenth of another set": Change(described(digits), 0.1),
    }
    return Population(same, changes)


def compress(image: Image.Image) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=10)
    return Image.open(buffer)


def draw_rows(seed: int, rows: int) -> tuple[Rows, Rows]:
    random = np.random.default_rng(seed)
    table = np.column_stack([random.normal(size=(rows, NUMBERS)), random.integers(0, CATEGORIES, rows)])
    return table.astype(np.float32), (table.sum(1) + random.normal(size=rows)).astype(np.float32)


def table_set(_: str) -> Any:
    return arrays(draw_rows(0, TRAINED), draw_rows(1, TRAINED))


def linear(num_classes: int, input_shape: tuple[int]) -> nn.Module:
    return nn.Linear(*input_shape, num_classes)


def make_table(options: Options) -> Population:
    own = {"dataset": "benchmarks.drift:table_set", "model": "benchmarks.drift:linear", "objective": "regression"}
    model, _ = train(options, **own)
    rows, _ = draw_rows(2, POOL)
    shifted, new = rows.copy(), rows.copy()
    shifted[:, 0] += 0.5
    new[:, NUMBERS] = CATEGORIES
    same, higher, others = (describe(model, each, torch.from_numpy) for each in (rows, shifted, new))
    return Population(same, {"a shifted column": Change(higher), "a new category": Change(others, 0.2)})


def draw_texts(seed: int, texts: int, times: int = 1) -> tuple[list[Rows], Rows]:
    """Return generated texts and their classes. The frequency of tokens falls like the frequency of words.

    The class is whether most tokens are even.
    """
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, TOKENS)
    found = [
        random.choice(np.arange(1, TOKENS), times * length, p=shares / shares.sum())
        for length in random.integers(1, LONGEST + 1, texts)
    ]
    return found, np.array([int((text % 2 == 0).mean() > 0.5) for text in found])


def text_set(_: str) -> Any:
    return on_demand(Texts(0), Texts(1), classes=["odd", "even"])


class Texts:
    """A map-style data set of texts."""

    def __init__(self, seed: int) -> None:
        self.texts, self.classes = draw_texts(seed, TRAINED)

    def __len__(self) -> int:
        return TRAINED

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.texts[number]), int(self.classes[number])


class MeanOfEmbeddings(nn.Module):
    """Maps texts [n, longest] to logits by the mean of their tokens' embeddings."""

    def __init__(self, num_classes: int, **_: Any) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, num_classes)

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        states = self.words(text) * mask[..., None]
        logits: Tensor = self.head(states.sum(1) / mask.sum(1, keepdim=True))
        return logits


def make_texts(options: Options) -> Population:
    own = {"dataset": "benchmarks.drift:text_set", "model": "benchmarks.drift:MeanOfEmbeddings", "collate": "padded"}
    model, _ = train(options, **own)

    def pad(texts: Any) -> tuple[Tensor, Tensor]:
        padded = nn.utils.rnn.pad_sequence([torch.from_numpy(text) for text in texts], batch_first=True)
        return padded, padded > 0

    same, longer = (describe(model, draw_texts(seed, POOL, seed)[0], pad) for seed in (1, 2))  # type: ignore[arg-type]
    return Population(same, {"texts twice as long": Change(longer)})
