"""Models whose inputs are no images, as ONNX."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import leaf_models
import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from flyte_ddp.datasets.on_demand_set import OnDemandSet
from flyte_ddp.export import exporting_leaves
from flyte_ddp.export.comparison import Comparison
from flyte_ddp.export.exporting import export_model
from flyte_ddp.export.graphs import NotExportedError, write_onnx
from flyte_ddp.export.served import name_outputs
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.settings import Settings

QUIET = Settings(progress="off", loaders=2)


def draw_inputs(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    drawn = {
        "float": torch.randn,
        "tokens": lambda shape: torch.randint(0, leaf_models.TOKENS, shape),
        "mask": lambda shape: torch.arange(shape[1]) < torch.randint(1, shape[1] + 1, (shape[0], 1)),
    }
    return {name: drawn[kind](shape) for name, (kind, shape) in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "objective", "by_name", "shapes"),
    [
        ("language", leaf_models.Causal, "language", False, {"inputs": ("tokens", (3, 40)), "mask": ("mask", (3, 40))}),
        pytest.param(
            "series",
            leaf_models.Recurrent,
            "regression",
            True,
            {"mask": ("mask", (3, 40)), "values": ("float", (3, 40, 2)), "area": ("float", (3,))},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_other_programs_get_what_the_model_returns(
    tmp_path: Path,
    data: str,
    model: type[nn.Module],
    objective: str,
    by_name: bool,
    shapes: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Of the test split, and of more and longer samples than the test split has."""
    split = getattr(leaf_models, data)()
    module, files = leaf_models.save_untrained(tmp_path, model, split, objective=objective, collate="padded")
    found = export_model(SavedModel(*files, QUIET), split, tmp_path)
    assert found.passed
    assert found.worst < 1e-5 * max(1, found.highest)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == [*shapes]
    names = [each.name for each in session.get_outputs()]

    def compute(inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
        returned = module(**inputs) if by_name else module(*inputs.values())
        return {name: values.detach().numpy() for name, values in name_outputs(returned).items()}

    given = draw_inputs(shapes)
    expected = compute(given)
    answers = session.run(names, {name: leaf.numpy() for name, leaf in given.items()})
    for name, answer in zip(names, answers, strict=True):
        np.testing.assert_allclose(answer, expected[name], rtol=1e-4, atol=1e-5 * np.abs(expected[name]).max())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_output_is_compared_by_its_own_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden values go up to some thousands: a hundredth of the logits' range is little of theirs."""
    split = leaf_models.language()
    _, files = leaf_models.save_untrained(tmp_path, leaf_models.Causal, split, objective="language", collate="padded")

    def write_others(served: Any, *arguments: Any, **names: Any) -> None:
        with torch.no_grad():
            served.model.last.bias[3] += 0.05
            write_onnx(served, *arguments, **names)
            served.model.last.bias[3] -= 0.05

    monkeypatch.setattr(exporting_leaves, "write_onnx", write_others)
    found = export_model(SavedModel(*files, QUIET), split, tmp_path)
    assert not found.passed
    assert found.worst == pytest.approx(0.05, rel=1e-3)
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.json"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_samples_that_own_code_reads_and_collates(tmp_path: Path) -> None:
    """Its whole numbers of 32 bits are sent as int64."""
    split = OnDemandSet("leaf_models:items", "", leaf_models.TRAIN, leaf_models.TEST, ("a", "b", "c"), "")
    _, files = leaf_models.save_untrained(tmp_path, leaf_models.MaskedMean, split, collate="leaf_models:collate")
    assert export_model(SavedModel(*files, QUIET), split, tmp_path).passed
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.type for each in session.get_inputs()] == ["tensor(int64)", "tensor(bool)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (leaf_models.Branching, r"^Unsupported: Data-dependent branching$"),
        (leaf_models.PerSample, r"You marked n as dynamic but your code specialized it to be a constant \(7\)"),
        (leaf_models.Nested, r"^its outputs hold no tensor of floats by name$"),
    ],
)
def test_what_cannot_be_exported_is_told(tmp_path: Path, capfd: Any, model: type[nn.Module], reason: str) -> None:
    split = leaf_models.table()
    _, files = leaf_models.save_untrained(tmp_path, model, split)
    with pytest.raises(NotExportedError, match=reason):
        export_model(SavedModel(*files, QUIET), split, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.json"}
    assert not capfd.readouterr().err


@dataclass
class Heads:
    first: Tensor
    others: tuple[Tensor, ...]


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda values: values, ["outputs"]),
        (lambda values: (values, values.long(), values.half()), ["outputs_0", "outputs_2"]),
        (lambda values: {"logits": values, "cache": [values], "scale": values[0, 0]}, ["logits", "scale"]),
        (lambda values: Heads(values, (values,)), ["first"]),
        (lambda values: SimpleNamespace(logits=values, more=values), ["logits"]),
        (lambda values: values.tolist()[0][0], []),
    ],
)
def test_names_of_outputs(returned: Callable[[Tensor], Any], names: list[str]) -> None:
    found = name_outputs(returned(torch.rand(2, 3)))
    assert [*found] == names
    assert {values.dtype for values in found.values()} <= {torch.float32}


def test_a_sample_has_another_class_only_if_torch_is_sure() -> None:
    of_torch = np.array([[0, 1, 0], [0, 0.5, 0.505], [1, 0, 0.98]], np.float32)
    of_onnx = np.array([[0, 1, 0], [0, 0.505, 0.5], [0.98, 0, 1]], np.float32)
    for classes, others in ((True, {5 + 2}), (False, set())):
        found = Comparison(classes, tolerance=0.01)
        found.add_batch(range(5, 8), of_onnx, of_torch)
        assert found.others == others
        assert found.worst == pytest.approx(0.02)
        assert (found.lowest, found.highest) == (0, 1)
