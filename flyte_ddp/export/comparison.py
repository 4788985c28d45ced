"""Compares the outputs of an ONNX with torch's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.export.onnx_process import Arrays, OnnxProcess
from flyte_ddp.machine.resources import count_cores

BATCH_SIZES = (1, 7, 64)  # of several, as a graph may have taken the size of a batch for a constant
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}  # of the outputs' range; a GPU's convolutions are in TF32, of 10 bits
ROUNDING = 1e-5  # of the largest number of an output: float32 cannot be compared more exactly, however small the range

Batches = Iterator[tuple[Sequence[int], Arrays, Arrays]]  # numbers of the samples, inputs, and torch's outputs


@dataclass
class Comparison:
    """How far an ONNX's outputs, such as logits, are from torch's."""

    of_classes: bool = True  # whether the outputs are logits of which the largest is the sample's class
    tolerance: float = 0.0  # the largest difference of a number that is allowed; known when all samples are
    worst: float = 0.0  # the largest difference so far
    lowest: float = np.inf  # of torch's outputs so far
    highest: float = -np.inf
    # By the number of a sample with another class than torch's: how far torch's two largest logits are apart.
    margins: dict[int, float] = field(default_factory=dict)

    @property
    def others(self) -> set[int]:
        """Numbers of samples with another class than torch's, whose two largest logits differ by more than allowed."""
        return {sample for sample, margin in self.margins.items() if margin > self.tolerance}

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance and not self.others

    def add_batch(self, samples: Sequence[int], of_onnx: NDArray[np.float32], of_torch: NDArray[np.float32]) -> None:
        """Add the ONNX's and torch's outputs [n, ...] of the ``samples`` of these numbers [n] to the comparison."""
        differences = np.nan_to_num(np.abs(of_onnx - of_torch), nan=np.inf)
        self.worst = max(self.worst, float(differences.max(initial=0.0)))
        self.lowest = min(self.lowest, float(of_torch.min(initial=np.inf)))
        self.highest = max(self.highest, float(of_torch.max(initial=-np.inf)))
        if not self.of_classes:
            return
        second, best = np.sort(of_torch, axis=1)[:, -2:].T
        for place in np.flatnonzero(of_onnx.argmax(axis=1) != of_torch.argmax(axis=1)).tolist():
            self.margins[samples[place]] = float(best[place] - second[place])

    def set_tolerance(self, device: str) -> None:
        largest = max(abs(self.lowest), abs(self.highest))
        self.tolerance = TOLERANCE[device] * (self.highest - self.lowest) + ROUNDING * largest


def compare_outputs(path: Path, batches: Batches, found: Mapping[str, Comparison], device: str = "cpu") -> Comparison:
    """Run the ONNX at ``path`` on all batches in a new process, and compare each output with torch's on ``device``.

    Returns the comparison of the output that is furthest from torch's for its range.
    """
    with OnnxProcess(path, count_cores()) as onnx:
        for samples, inputs, of_torch in batches:
            of_onnx = onnx.compute_outputs(inputs)
            for name, each in found.items():
                each.add_batch(samples, of_onnx[name], of_torch[name])
    for each in found.values():
        each.set_tolerance(device)
    return max(found.values(), key=lambda each: (not each.passed, each.worst / (each.tolerance or 1)))
