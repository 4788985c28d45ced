"""How far an ONNX's outputs are from torch's, and which of them users get as golden requests."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BATCH_SIZES = (1, 7, 64)  # of several, as a graph may have taken the size of a batch for a constant
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}  # of the outputs' range; a GPU's convolutions are in TF32, of 10 bits
REQUESTS, GOLDEN_BYTES = 16, 32 * 2**20  # golden requests; fewer if they are larger in all


@dataclass
class Comparison:
    """How far an ONNX's outputs, such as logits, are from torch's."""

    tolerance: float = 0.0  # the largest difference of a number that is allowed
    of_classes: bool = True  # whether the outputs are logits of which the largest is the sample's class
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

    def add_batch(self, first_sample: int, of_onnx: NDArray[np.float32], of_torch: NDArray[np.float32]) -> None:
        """Add the ONNX's and torch's outputs [n, ...] of the samples from ``first_sample`` on to the comparison."""
        differences = np.nan_to_num(np.abs(of_onnx - of_torch), nan=np.inf)
        self.worst = max(self.worst, float(differences.max(initial=0.0)))
        self.lowest = min(self.lowest, float(of_torch.min(initial=np.inf)))
        self.highest = max(self.highest, float(of_torch.max(initial=-np.inf)))
        if not self.of_classes:
            return
        second, best = np.sort(of_torch, axis=1)[:, -2:].T
        for place in np.flatnonzero(of_onnx.argmax(axis=1) != of_torch.argmax(axis=1)).tolist():
            self.margins[first_sample + place] = float(best[place] - second[place])


def choose_requests(samples: int) -> set[int]:
    """Return the numbers of up to REQUESTS (16) of the ``samples``, evenly spread, for golden requests."""
    return {*np.linspace(0, samples - 1, REQUESTS, dtype=int).tolist()}
