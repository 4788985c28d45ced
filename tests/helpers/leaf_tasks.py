"""Small tasks without images: texts, series and tables, with models and user-defined objectives."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from objective_tasks import TEST, TRAIN
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp import arrays, on_demand
from flyte_ddp.datasets.on_demand_set import OnDemand
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.objectives import Objective

SAMPLES = TRAIN + TEST
TOKENS = 7
Array = NDArray[Any]
Pair = tuple[Any, Any]


def words() -> list[Array]:
    """Return texts of 2 to 9 tokens."""
    random = np.random.default_rng(11)
    return [random.integers(0, TOKENS, length) for length in random.integers(2, 10, SAMPLES)]


def hide(number: int, targets: Array) -> Array:
    """Return targets whose beginning is ignored, as of prompts. Every second text is ignored completely."""
    hidden = targets.copy()
    hidden[: len(targets) if number % 2 else number % 3] = -100
    return hidden


def sides(inputs: Sequence[Any], targets: Sequence[Any]) -> tuple[Pair, Pair]:
    """Return training and test samples."""
    return (inputs[:TRAIN], targets[:TRAIN]), (inputs[TRAIN:], targets[TRAIN:])


def texts(source: str) -> SampleArrays:
    """Return texts of 1 to 8 tokens with the next token at each place as target."""
    targets = [hide(number, text[1:]) for number, text in enumerate(words())]
    return arrays(*sides([text[:-1] for text in words()], targets), classes=[*map(str, range(TOKENS))])


def whole_texts(source: str) -> SampleArrays:
    """Return texts of 1 to 8 tokens with the same texts as targets, for the option ``shift``."""
    found = [text[:-1] for text in words()]
    targets = [hide(number, text) for number, text in enumerate(found)]
    return arrays(*sides(found, targets), classes=[*map(str, range(TOKENS))])


def series(source: str) -> SampleArrays:
    """Return series with two numbers at each place as inputs and a number to predict."""
    random = np.random.default_rng(13)
    lengths = random.integers(1, 7, SAMPLES)
    inputs = [random.normal(size=(length, 2)).astype(np.float32) for length in lengths]
    return arrays(*sides(inputs, [values.sum(1) for values in inputs]))


FORMS: dict[str, Any] = {
    "tensor": lambda logits, _: logits,
    "dict": lambda logits, hidden: {"hidden": hidden, "logits": logits},
    "object": lambda logits, hidden: SimpleNamespace(logits=logits, hidden=hidden),
}


class Reader(nn.Module):
    """The output at a place depends on earlier tokens only, so padding at the end has no effect."""

    def __init__(self, num_classes: int, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(num_classes, 4)
        self.gru = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, num_classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
        hidden, _ = self.gru(self.embed(tokens))
        return FORMS[self.form](self.head(hidden), hidden)


def table(source: str) -> SampleArrays:
    """Return a table that predicts a number from numbers and a kind. Some targets are unknown."""
    random = np.random.default_rng(14)
    numbers, kinds = random.normal(size=(SAMPLES, 4)).astype(np.float32), random.integers(0, 3, SAMPLES)
    targets = (numbers[:, 0] * kinds).astype(np.float32)
    targets[::3] = np.nan
    part = [{"numbers": numbers[rows], "kind": kinds[rows]} for rows in (slice(TRAIN), slice(TRAIN, None))]
    return arrays((part[0], targets[:TRAIN]), (part[1], targets[TRAIN:]))


class Tabular(nn.Module):
    """A model that is called with keywords."""

    def __init__(self, num_classes: int, input_shape: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        assert input_shape == {"numbers": (4,), "kind": ()}
        self.embed, self.last = nn.Embedding(3, 2), nn.Linear(6, num_classes)

    def forward(self, *, kind: Tensor, numbers: Tensor) -> Tensor:
        return self.last(torch.cat([numbers, self.embed(kind)], 1).tanh())


def pairs(source: str) -> SampleArrays:
    """Return samples with two inputs, and with a number and a class as targets."""
    random = np.random.default_rng(15)
    left, right = (random.normal(size=(SAMPLES, width)).astype(np.float32) for width in (3, 2))
    targets = {"amount": left[:, 0] * right[:, 0], "kind": random.integers(0, 3, SAMPLES)}
    train, test = (
        ((left[rows], right[rows]), {name: values[rows] for name, values in targets.items()})
        for rows in (slice(TRAIN), slice(TRAIN, None))
    )
    return arrays(train, test)


class TwoInputs(nn.Module):
    """Returns a number and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        found = self.last((self.left(left) + self.right(right)).tanh())
        return found[:, 0], found[:, 1:]


class NumberAndClass(Objective):
    """The sum of two losses. Samples of class 0 do not count, and samples of class 2 count twice."""

    def weights(self, targets: dict[str, Tensor]) -> Tensor:
        return targets["kind"].float()

    def losses(self, outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
        amount, logits = outputs
        return (amount - targets["amount"]) ** 2 + functional.cross_entropy(logits, targets["kind"], reduction="none")


def reviews(source: str) -> SampleArrays:
    """Return samples with a class as target, and with two numbers and a text as inputs."""
    random = np.random.default_rng(16)
    found, numbers = words(), random.normal(size=(SAMPLES, 2)).astype(np.float32)
    classes = np.array([text.max() // 3 for text in found])
    train, test = (
        ({"numbers": numbers[rows], "tokens": found[rows]}, classes[rows])
        for rows in (slice(TRAIN), slice(TRAIN, None))
    )
    return arrays(train, test)


class Bag(nn.Module):
    """Averages the tokens that the mask selects."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 4), nn.Linear(6, num_classes)

    def forward(self, tokens: Tensor, numbers: Tensor, mask: Tensor) -> Tensor:
        counts = mask[..., None].to(numbers.dtype)
        mean = (self.embed(tokens) * counts).sum(1) / counts.sum(1)
        return self.head(torch.cat([mean, numbers], 1))


def to_multiples_of_four(samples: list[tuple[dict[str, Any], Any]]) -> Pair:
    """Pad at the beginning."""
    longest = -(-max(len(inputs["tokens"]) for inputs, _ in samples) // 4) * 4
    tokens, mask = torch.zeros(len(samples), longest, dtype=torch.int64), torch.zeros(len(samples), longest)
    for row, (inputs, _) in enumerate(samples):
        tokens[row, longest - len(inputs["tokens"]) :] = torch.as_tensor(np.asarray(inputs["tokens"]))
        mask[row, longest - len(inputs["tokens"]) :] = 1
    numbers = torch.stack([torch.as_tensor(np.asarray(inputs["numbers"])) for inputs, _ in samples])
    return {"tokens": tokens, "numbers": numbers, "mask": mask.bool()}, torch.tensor([int(each) for _, each in samples])


class Reviews:
    """The same samples one by one, as Hugging Face's sets return them."""

    def __init__(self, first: int, last: int) -> None:
        data = reviews("")
        side = "train" if first == 0 else "test"
        self.inputs, self.labels = getattr(data, f"{side}_inputs"), getattr(data, f"{side}_targets")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        tokens, numbers = self.inputs["tokens"][number].tolist(), torch.from_numpy(self.inputs["numbers"][number])
        return {"numbers": numbers, "tokens": tokens, "labels": int(self.labels[number])}


def reviews_on_demand(source: str) -> OnDemand:
    return on_demand(Reviews(0, TRAIN), Reviews(TRAIN, SAMPLES), classes=["low", "middle", "high"])


def reviews_as_sets(source: str) -> tuple[Reviews, Reviews]:
    return Reviews(0, TRAIN), Reviews(TRAIN, SAMPLES)
