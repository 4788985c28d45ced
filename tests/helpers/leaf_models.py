"""Models of tables and texts with data sets, and the files beside the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sidecars import make_sidecar
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.core.models.saving import save_model
from flyte_ddp.core.samples.leaves import Leaves
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.prepared_set import Opening
from flyte_ddp.datasets.sample_arrays import SampleArrays, arrays

TRAIN, TEST, TOKENS = 4, 23, 11


def draw_lengths() -> list[int]:
    return np.random.default_rng(0).integers(1, 9, TRAIN + TEST).tolist()


def draw_tokens() -> list[np.ndarray]:
    """Return texts of 1 to 8 tokens."""
    random = np.random.default_rng(1)
    return [random.integers(0, TOKENS, length, dtype=np.int32) for length in draw_lengths()]


def halves(inputs: Any, targets: Any) -> SampleArrays:
    """Return a data set of TRAIN and TEST samples from inputs and targets."""

    def cut(leaves: Any, part: slice) -> Any:
        return {name: leaf[part] for name, leaf in leaves.items()} if isinstance(leaves, dict) else leaves[part]

    first, last = slice(TRAIN), slice(TRAIN, None)
    return arrays((cut(inputs, first), cut(targets, first)), (cut(inputs, last), cut(targets, last)))


def draw_table() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(TRAIN + TEST, 5))


def table() -> SampleArrays:
    return halves(draw_table(), np.arange(TRAIN + TEST) % 3)


def language() -> SampleArrays:
    return halves(draw_tokens(), draw_tokens())


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


class Causal(nn.Module):
    """A transformer that predicts the next token. Returns logits and hidden values by name."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 8), nn.Embedding(64, 8)
        self.inner, self.last = nn.Linear(8, 24), nn.Linear(8, TOKENS)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        del mask
        samples, length = tokens.shape
        values = self.tokens(tokens) + self.places(torch.arange(length))
        parts = [part.view(samples, length, 2, 4).transpose(1, 2) for part in self.inner(values).chunk(3, -1)]
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        values = values + attended.transpose(1, 2).reshape(samples, length, 8)
        return {"logits": self.last(values), "hidden": 1000 * values}


class Branching(Mlp):
    """Computes large numbers in another branch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if inputs.sum() < 1e3 else inputs[:, :3]


class PerSample(Mlp):
    """Computes the samples one by one."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([super(PerSample, self).forward(row[None]) for row in inputs])


class Nested(Mlp):
    """Returns no tensor with a name."""

    def forward(self, inputs: Tensor) -> Leaves:
        return {"all": [super().forward(inputs)]}


class SameName(Mlp):
    """Returns a tensor with the name of the input."""

    def forward(self, inputs: Tensor) -> Leaves:
        return {"inputs": super().forward(inputs)}


def save_untrained(
    folder: Path, model: type[nn.Module], data: ItemSet, *, objective: str = "classification", collate: str = "stacked"
) -> tuple[nn.Module, tuple[Path, Path]]:
    """Return a model with new weights and the paths of its model.pt and model.json."""
    torch.manual_seed(0)
    module = model().eval()
    split, spec = data.open_test_split(Opening(torch.device("cpu"), Settings(loaders=1), collate=collate))
    split.source.close()
    sidecar = make_sidecar(
        spec,
        f"leaf_models:{model.__name__}",
        objective=objective,
        classes=[*data.classes],
        outputs=3,
        target_shape=[] if data.classes else [1],
        hyperparameters={"collate": collate},
    )
    return module, save_model(folder, module.state_dict(), sidecar)
