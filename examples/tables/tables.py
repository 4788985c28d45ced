"""Three tables of numbers: two of scikit-learn's, and generated houses. Targets are numbers or classes.

- ``pyflyte run workflows/training.py training_wf --hp examples/tables/diabetes.json``
- ``pyflyte run workflows/training.py training_wf --hp examples/tables/breast_cancer.json``
- ``pyflyte run workflows/training.py training_wf --hp examples/tables/houses.json``
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from flyte_ddp import arrays

PARTS = ("mean", "error", "worst")
HOUSES = 10_000


def read_diabetes(source: str) -> Any:  # noqa: ARG001 (the hyperparameter data_source, unused here)
    """Return 442 patients with 10 numbers each. The target is the disease's progression after a year, as a float."""
    features, progression = load_diabetes(return_X_y=True)
    return arrays(*split_table(features, (progression / 100).astype(np.float32)))


def read_tumours(source: str) -> Any:  # noqa: ARG001
    """Return 569 tumours of two classes, as a dict of mean, error and worst value of 10 measurements."""
    data = load_breast_cancer()
    sides = [(name_parts(features), classes) for features, classes in split_table(data.data, data.target)]
    return arrays(*sides, classes=data.target_names)


def name_parts(features: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return 30 columns as a dict of three tables of 10."""
    return dict(zip(PARTS, np.split(features, len(PARTS), axis=1), strict=True))


def draw_houses(source: str) -> Any:  # noqa: ARG001
    """Return 10,000 generated houses with 8 columns, similar to California's.

    The target is the price in 100,000 dollars, as a float. A tenth of the price is noise, which no model can predict.
    """
    random = np.random.default_rng(0)
    income, in_house = random.gamma(3.5, 1.1, HOUSES), random.gamma(9, 0.33, HOUSES)
    age, rooms = random.integers(1, 53, HOUSES), random.normal(5.4, 1.2, HOUSES)
    bedrooms, people = 0.2 * rooms + random.normal(0, 0.1, HOUSES), random.lognormal(7, 0.7, HOUSES)
    north, west = random.uniform(32.5, 42, HOUSES), random.uniform(114.3, 124.3, HOUSES)
    from_coast = abs(124.3 - west - 0.75 * (42 - north))
    price = 0.45 * income + 1.6 * np.exp(-from_coast) * np.sqrt(income) + 0.01 * age - 0.5 * np.log(in_house) + 1
    price *= random.lognormal(0, 0.1, HOUSES)
    features = np.stack([income, age, rooms, bedrooms, people, in_house, north, west], 1)
    return arrays(*split_table(features, price.astype(np.float32)))


def split_table(features: NDArray[Any], targets: NDArray[Any]) -> Any:
    """Return pairs (features, targets) for training and for tests.

    Features are standardised by the mean and deviation of the training features.
    """
    train, test, train_targets, test_targets = train_test_split(features, targets, test_size=0.2, random_state=42)
    centre, spread = train.mean(0), train.std(0)
    return ((train - centre) / spread, train_targets), ((test - centre) / spread, test_targets)


def make_perceptron(num_classes: int, input_shape: tuple[int], width: int = 64) -> nn.Sequential:
    """Return a network of two hidden layers.

    ``num_classes`` is the number of classes, or of numbers in a target. The hyperparameter ``options`` may set
    ``width``.
    """
    hidden = [nn.Linear(*input_shape, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Dropout(0.1), nn.Linear(width, num_classes))


class PartsModel(nn.Module):
    """A perceptron on tables that are the leaves of a dict, and arrive as keyword arguments."""

    def __init__(self, num_classes: int, input_shape: dict[str, tuple[int]]) -> None:
        super().__init__()
        self.layers = make_perceptron(num_classes, (sum(columns for (columns,) in input_shape.values()),))

    def forward(self, mean: Tensor, error: Tensor, worst: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat((mean, error, worst), 1))
        return logits
