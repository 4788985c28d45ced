"""User-defined data sets on demand, augmentations and collates, named in tests as ``item_sets:...``."""

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import faults
import numpy as np
import own_loading
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

from flyte_ddp import on_demand
from flyte_ddp.datasets.on_demand_set import OnDemand

Samples = list[tuple[Any, Any]]
LONGEST = 7
MARKER = "ITEM_SETS_MARKER"  # variable with a path; while the file is missing, the functions fail


def goes_wrong() -> bool:
    return not Path(os.environ[MARKER]).exists()


class Drawing:
    """A set whose samples draw from all generators, and from a transform that is seeded by ``set_random_seed`` only."""

    sample_weights = np.arange(40.0)

    def __init__(self, samples: int) -> None:
        self.samples, self.transform = samples, own_loading.Fake()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> Any:
        if number >= self.samples:
            raise IndexError(number)
        own = self.transform(image=np.zeros(1, np.uint8), mask=0)["image"]
        drawn = [random.random(), np.random.rand(), torch.rand(()).item(), *own]  # noqa: NPY002
        return {"row": number, "drawn": np.float32(drawn), "tokens": [number] * (1 + number % LONGEST)}, number % 3


def drawing(source: str) -> OnDemand:
    return on_demand(Drawing(40), Drawing(9), classes="abc")


def wrapped(source: str) -> OnDemand:
    """Return the set in torch's Subset. The library must still find the transform."""
    sets = drawing(source)
    return on_demand(Subset(sets.train, range(40)), sets.test, classes="abc")


class Numbers:
    """A set like JSON, with whole numbers as ints. ``dataset`` is no map-style set, or refers to itself."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.dataset = rows, object() if len(rows) % 2 else self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number], number % 3


def numbers(source: str) -> OnDemand:
    return on_demand(Numbers([[2, 1], [0.5, 1], [3, 4], [True, False]] * 10), Numbers([[1, 2]] * 9), classes="abc")


def whole_numbers(source: str) -> OnDemand:
    rows: list[Any] = [[number, 1] for number in range(40)]
    rows[8], rows[9] = [2.0, 1], [0.5, 1]  # not among the samples that are read first
    return on_demand(Numbers(rows), Numbers([[1, 2]] * 9), classes="abc")


class Stuck(Numbers):
    """A set with a sample that never arrives: blocked in Python, or where Python's signal handlers cannot run."""

    def __getitem__(self, number: int) -> Any:
        if number == 17:
            if self.rows[0][0]:
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            threading.Event().wait()
        return [1.0, 2.0], number % 3


def wait_for_ever(*_: Any) -> None:
    threading.Event().wait()


def stuck(source: str) -> OnDemand:
    return on_demand(Stuck([[0]] * 40), Stuck([[0]] * 9), classes="abc")


def stuck_for_good(source: str) -> OnDemand:
    return on_demand(Stuck([[1]] * 40), Stuck([[1]] * 9), classes="abc")


def shuffled(source: str) -> OnDemand:
    """Return sides that are drawn at random, as by scikit-learn's train_test_split without a seed."""
    rows = [(number, int(torch.randint(9, ()))) for number in np.random.permutation(49).tolist()]  # noqa: NPY002
    random.shuffle(rows)
    return on_demand(rows[:40], rows[40:], classes="abc")


class FailingAt(Drawing):
    """Lacks item 19 while the marker is missing. The rank does not read this item before training."""

    def __getitem__(self, number: int) -> Any:
        if number == 19 and goes_wrong():
            raise IndexError("the set's own words")
        return super().__getitem__(number)


def failing(source: str) -> OnDemand:
    return on_demand(FailingAt(40), FailingAt(9), classes="abc")


def changing(source: str) -> OnDemand:
    """Return a set with another length while the marker is missing."""
    return on_demand(Drawing(39 if goes_wrong() else 40), Drawing(9), classes="abc")


def add_noise(inputs: dict[str, Any], target: int) -> Any:
    """Change the inputs in place, as users do."""
    inputs["drawn"] += np.float32([random.random(), np.random.rand(), torch.rand(()).item(), 0])  # noqa: NPY002
    return inputs, target


class Mapped(dict[str, Any]):
    """A mapping whose values torch does not see, as of tokenizers."""


def collate(samples: Samples) -> Any:
    """Return a text and None beside the tensors. Takes the items apart, as users do."""
    tokens = pad_sequence([torch.tensor(inputs.pop("tokens")) for inputs, _ in samples], batch_first=True)
    found = {
        "tokens": tokens, "row": torch.tensor([inputs["row"] for inputs, _ in samples]),
        "drawn": torch.stack([torch.as_tensor(inputs["drawn"]) for inputs, _ in samples]),
        "noise": torch.rand(len(samples)), "text": [f"row {inputs['row']}" for inputs, _ in samples], "nothing": None,
        "bf16": torch.ones(len(samples), dtype=torch.bfloat16),
    }  # fmt: skip
    return Mapped(found), torch.tensor([target for _, target in samples])


def collate_nothing(samples: Samples) -> Any:
    return None


def collate_texts(samples: Samples) -> Any:
    return "inputs", torch.zeros(len(samples))


class Graphs:
    """A batch like torch-geometric's: not a tensor, and moved by ``to``."""

    def __init__(self, nodes: torch.Tensor, device: Any = None) -> None:
        self.nodes, self.device = nodes, device

    def to(self, device: Any) -> "Graphs":
        return Graphs(self.nodes, device)


def collate_graphs(samples: Samples) -> Any:
    return Graphs(torch.ones(len(samples))), torch.zeros(len(samples))


def leave_one_out(samples: Samples) -> Any:
    inputs, targets = collate(samples)
    return inputs, targets[1:]


def fail_to_collate(samples: Samples) -> Any:
    raise KeyError("the collate's own words")


def out_of_memory(samples: Samples) -> Any:
    if len(samples) > 1 and any(inputs["row"] == 17 for inputs, _ in samples):
        raise MemoryError
    return collate(samples)


class Model(nn.Module):
    """Accepts the samples of all these functions. Uses only the first token, so padding has no effect."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(40, 3), nn.Linear(7, num_classes)

    def forward(self, tokens: Tensor, drawn: Tensor, row: Tensor, mask: Tensor | None = None, **rest: Any) -> Tensor:
        del row, rest, mask
        faults.passing("training" if self.training else "evaluation")
        return self.last(torch.cat([self.embed(tokens[:, 0]), drawn], 1))


class Deaf(Model):
    """Does not accept all inputs of the samples."""

    def forward(self, tokens: Tensor, drawn: Tensor) -> Tensor:  # type: ignore[override]
        return self.last(torch.cat([self.embed(tokens[:, 0]), drawn], 1))
