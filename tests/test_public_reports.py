"""What went wrong for others, as public reports tell it: each test is one of their situations, with this library."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from predictions import predict_rows
from sidecars import make_sidecar
from torch import Tensor, nn
from torch.nn import functional
from training_runs import QUIET, train_in, weights

from flyte_ddp import arrays, load_model
from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.order.sampling import ListedOrder
from flyte_ddp.datasets import fetch
from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.objectives.language import Language
from flyte_ddp.predict.new_rows import read_new_rows
from flyte_ddp.run import Result

HP = Hyperparameters(num_ranks=1, epochs=1, batch_size=16, validation_fraction=0.0, schedule="constant")
TOKENS = 12


def run(folder: Path, dataset: str, model: str, **values: Any) -> Result:
    """Train with a data set and a model of this module."""
    hp = replace(HP, dataset=f"{__name__}:{dataset}", model=f"{__name__}:{model}", **values)
    data = fetch(hp.dataset, "", folder / "data", progress="off")
    return train_in(folder / "run", hp, data)


def table(source: str) -> Any:
    inputs = np.random.default_rng(0).normal(size=(103, 4)).astype(np.float32)
    targets = (inputs.sum(1) > 1).astype(int)
    return arrays((inputs[:60], targets[:60]), (inputs[60:], targets[60:]), classes=["no", "yes"])


def other_order(source: str) -> Any:
    """The same table, with its classes in another order."""
    data = table(source)
    sides = ((data.train_inputs, 1 - data.train_targets), (data.test_inputs, 1 - data.test_targets))
    return arrays(*sides, classes=["yes", "no"])


def draw_texts(shortest: int, samples: int) -> list[np.ndarray]:
    """Texts of tokens from 1 on; 0 ends each, and is what padding is, too."""
    random = np.random.default_rng(0)
    return [np.array([*random.integers(1, TOKENS, random.integers(shortest, 9)), 0]) for _ in range(samples)]


def language(source: str) -> Any:
    texts = draw_texts(1, 60)
    return arrays((texts[:40], texts[:40]), (texts[40:], texts[40:]), classes=[*"~abcdefghijk"])


def zeros(num_classes: int, input_shape: tuple[int]) -> nn.Module:
    model = nn.Linear(*input_shape, num_classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class NextToken(nn.Module):
    """Its last layer has the weights of its first one."""

    def __init__(self, num_classes: int, input_shape: tuple[int]) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(num_classes, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, num_classes)
        self.head.weight = self.tokens.weight

    def forward(self, texts: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.layer(self.tokens(texts))[0])


def test_the_gradient_of_a_whole_step_is_clipped(tmp_path: Path) -> None:
    """huggingface/accelerate#641, diffusers#721, simchowitzlabpublic/nano-world-model#22: that of each part was."""
    values = {"accumulation_steps": 3, "grad_clip_norm": 0.05, "precision": "fp64", "epochs": 2}
    result = run(tmp_path, "table", "zeros", momentum=0.0, nesterov=False, weight_decay=0.0, **values)
    model = zeros(2, (4,)).double()
    optimizer, data = torch.optim.SGD(model.parameters(), HP.learning_rate), table("")
    inputs, targets = torch.tensor(data.train_inputs).double(), torch.tensor(data.train_targets)
    clipped = 0
    for epoch in range(2):
        for batch in ListedOrder(np.arange(60), HP.seed).batches(epoch, HP.batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            clipped += bool(nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05)
            optimizer.step()
    assert clipped > 5
    found = weights(result)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_classes_in_another_order_are_taken_by_name(tmp_path: Path) -> None:
    """Socialbird-AILab/BERT-Classification-Tutorial#6, experiencor/keras-yolo3#82: predictions had others' names."""
    result, right = run(tmp_path, "table", "zeros", epochs=3), []
    for dataset in ("table", "other_order"):
        data = fetch(f"{__name__}:{dataset}", "", tmp_path / dataset, progress="off")
        files = result.model, result.sidecar
        rows = predict_rows(*files, tmp_path / f"{dataset}.csv", dataset=data, settings=QUIET)
        right.append([row["prediction"] == row["truth"] for row in rows])
    assert right[0] == right[1]
    assert np.mean(right[0]) == pytest.approx(result.test_accuracy)


@dataclass
class Frame:
    """What frames have: names of columns."""

    columns: list[str]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([[ord(name) for name in self.columns]] * 2, dtype=float)

    def __getitem__(self, columns: list[str]) -> "Frame":
        return Frame(columns)


def prepare(fitted: None, source: list[str]) -> tuple[Any, None]:
    return Frame(source), None


def test_columns_in_another_order_are_matched_by_name() -> None:
    """dmlc/xgboost#8357, lightgbm-org/LightGBM#4102, scikit-learn/scikit-learn#7242: wrong predictions, silently."""
    ab, ba, targets = Frame(["a", "b"]), Frame(["b", "a"]), np.arange(2)
    data = arrays((ab, targets), (ba, targets), prepare=prepare)
    assert data.test_inputs.tolist() == [[97, 98]] * 2
    sidecar = make_sidecar(preprocessing=data.preprocessing)
    for order in (["a", "b"], ["b", "a"]):
        assert read_new_rows(sidecar, order)[0].tolist() == [[97, 98]] * 2
    with pytest.raises(UserError, match=r"inputs: the columns are b, c, .* training had a, b"):
        read_new_rows(sidecar, ["b", "c"])
    with pytest.raises(UserError, match=r"test_inputs: the columns are b, c, .* training had a, b"):
        arrays((ab, targets), (Frame(["b", "c"]), targets))


def test_two_columns_of_one_name_are_refused() -> None:
    """pandas-dev/pandas#47958: a frame may have two columns of one name, as after a concat or a join."""
    twice, targets = Frame(["a", "b", "a"]), np.arange(2)
    with pytest.raises(UserError, match=r"a frame has two columns 'a': .*; rename one"):
        arrays((twice, targets), (twice, targets))
    ab = Frame(["a", "b"])
    data = arrays((ab, targets), (ab, targets), prepare=prepare)
    with pytest.raises(UserError, match=r"the columns are b, b, .* training had a, b"):
        read_new_rows(make_sidecar(preprocessing=data.preprocessing), ["b", "b"])


def test_perplexity_counts_the_end_of_a_text_and_no_padding(tmp_path: Path) -> None:
    """One token ends texts and pads them: huggingface/trl#6357, meta-pytorch/torchtune#949, mlabonne/llm-course#33.

    The perplexity depends on padding, or on the batch: ml-explore/mlx-lm#1855, axolotl-ai-cloud/axolotl#3988,
    facebookresearch/ParlAI#623. Tied weights come apart: huggingface/transformers#30202, pytorch/torchtitan#3764.
    """
    values = {"objective": "language", "collate": "padded", "options": {"objective": {"shift": True}}}
    result = run(tmp_path, "language", "NextToken", test_batch_size=5, **values)
    model, _ = load_model(result.model, result.sidecar)
    assert model.head.weight is model.tokens.weight
    losses = list[float]()
    for text in map(torch.tensor, draw_texts(1, 60)[40:]):
        losses += functional.cross_entropy(model(text[None, :-1])[0], text[1:], reduction="none").tolist()
    assert result.measures["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-6)


def test_targets_that_are_shifted_twice_or_never() -> None:
    """huggingface/transformers#32944, #10480, #46898; alibaba/Megatron-LLaMA#53: who shifts, the data or the loss?"""
    padded = nn.utils.rnn.pad_sequence([*map(torch.tensor, draw_texts(2, 8))], batch_first=True, padding_value=-100)
    inputs, next_tokens = padded.clamp(min=0), functional.pad(padded[:, 1:], (0, 1), value=-100)
    hidden = inputs.where(torch.arange(inputs.shape[1]) % 3 > 0, TOKENS - 1)  # as for a masked language model
    facts = Facts((*"~abcdefghijk",), (1,))
    given = {"never": (False, inputs, padded), "twice": (True, inputs, next_tokens)}
    right = [(True, inputs, padded), (False, inputs, next_tokens), (False, hidden, padded), (True, hidden, next_tokens)]
    told = {name: Language(facts, shift=shift).describe_wrong_targets(*pair) for name, (shift, *pair) in given.items()}
    assert "set options" in told["never"]
    assert told["twice"].endswith("Remove shift.")
    assert [Language(facts, shift=shift).describe_wrong_targets(*pair) for shift, *pair in right] == [""] * 4
    assert Classification(facts).describe_wrong_targets(inputs, padded) == ""
