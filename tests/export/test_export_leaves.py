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

from flyte_ddp.core.settings import Settings
from flyte_ddp.export import exporting
from flyte_ddp.export.exporting import export_onnx_if_equal
from flyte_ddp.export.graphs import NotExportedError, name_output_tensors, write_onnx
from flyte_ddp.predict.prediction_batches import SavedModel

QUIET = Settings(progress="off", loaders=2)


@pytest.mark.slow
def test_other_programs_get_what_the_model_returns(tmp_path: Path) -> None:
    """Of the test split, and of more and longer texts than the test split has."""
    split = leaf_models.language()
    module, files = leaf_models.save_untrained(
        tmp_path, leaf_models.Causal, split, objective="language", collate="padded"
    )
    found = export_onnx_if_equal(SavedModel(*files, QUIET), split, tmp_path)
    assert found.passed
    assert found.worst < 1e-5 * max(1, found.highest)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    torch.manual_seed(1)
    mask = torch.arange(40) < torch.randint(1, 41, (3, 1))
    given = {"inputs": torch.randint(0, leaf_models.TOKENS, (3, 40)), "mask": mask}
    assert [each.name for each in session.get_inputs()] == [*given]
    expected = name_output_tensors(module(*given.values()))
    answers = session.run([*expected], {name: leaf.numpy() for name, leaf in given.items()})
    for answer, values in zip(answers, expected.values(), strict=True):
        right = values.detach().numpy()
        np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_output_is_compared_by_its_own_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden values go up to some thousands: a hundredth of the logits' range is little of theirs."""
    split = leaf_models.language()
    _, files = leaf_models.save_untrained(tmp_path, leaf_models.Causal, split, objective="language", collate="padded")

    def write_others(served: Any, *arguments: Any) -> Any:
        with torch.no_grad():
            served.model.last.bias[3] += 0.05
            outputs = write_onnx(served, *arguments)
            served.model.last.bias[3] -= 0.05
        return outputs

    monkeypatch.setattr(exporting, "write_onnx", write_others)
    found = export_onnx_if_equal(SavedModel(*files, QUIET), split, tmp_path)
    assert not found.passed
    assert found.worst == pytest.approx(0.05, rel=1e-3)
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (leaf_models.Branching, r"^Unsupported: Data-dependent branching$"),
        (leaf_models.PerSample, r"You marked n as dynamic but your code specialized it to be a constant \(7\)"),
        (leaf_models.Nested, r"^its outputs contain no named float tensor$"),
        (leaf_models.SameName, r"^an input and an output are both called 'inputs'; rename the output$"),
    ],
)
def test_what_cannot_be_exported_is_told(tmp_path: Path, capfd: Any, model: type[nn.Module], reason: str) -> None:
    split = leaf_models.table()
    _, files = leaf_models.save_untrained(tmp_path, model, split)
    with pytest.raises(NotExportedError, match=reason):
        export_onnx_if_equal(SavedModel(*files, QUIET), split, tmp_path)
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
    found = name_output_tensors(returned(torch.rand(2, 3)))
    assert [*found] == names
    assert {values.dtype for values in found.values()} <= {torch.float32}
