"""Identifies the samples that a version was trained and judged on, by numbers that stay the same between releases."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.files import replace_file
from flyte_ddp.core.objectives.objective import mean_losses
from flyte_ddp.release.evaluation import Evaluation

SAMPLES = "samples.npz"  # of a version
NOISE = 0.01  # relative change of a sample's loss that threads and devices may cause

Digests = NDArray[np.uint64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class JudgedSamples:
    """The samples of a version's training and judgement, as identifying numbers, with the model's answers."""

    trained: Digests  # [N], validation samples included; empty: not known
    tested: Digests  # [n]; empty: not known
    answers: Floats  # [n], the result of answer_qualities()

    def write(self, path: Path) -> None:
        with replace_file(path) as file:
            np.savez_compressed(file, trained=self.trained, tested=self.tested, answers=self.answers)

    @classmethod
    def read(cls, content: bytes) -> "JudgedSamples":
        with np.load(io.BytesIO(content)) as stored:
            return cls(stored["trained"], stored["tested"], stored["answers"])


def answer_qualities(found: Evaluation) -> Floats:
    """Return a number for the quality of the model's answer on each sample, [n].

    For classification, a right class is 1 and a wrong class is 0. For other objectives the quality is minus the loss.
    The numbers depend on the model and the sample alone. Scores may be pseudo-values, which depend on all samples of
    the split, and are not used here.
    """
    return found.correct.astype(np.float64) if found.classifies else -mean_losses(found.columns).numpy()


def match_once(then: Digests, now: Digests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places, in ``then`` and in ``now``, of the samples that occur exactly once in both arrays.

    The same place of both results is the same sample.
    """
    found = []
    for digests in (then, now):
        values, first, counts = np.unique(digests, return_index=True, return_counts=True)
        found.append((values[counts == 1], first[counts == 1]))
    _, *common = np.intersect1d(found[0][0], found[1][0], assume_unique=True, return_indices=True)
    places = [first[at] for (_, first), at in zip(found, common, strict=True)]
    return places[0], places[1]


def find_changes(then: Floats, now: Floats) -> Floats:
    """Return ``now`` minus ``then`` [n], with 0 for changes that rounding may have caused.

    Such a change is at most NOISE (1 %) of the value in ``then``, or of the mean absolute value if larger.
    """
    changes = now - then
    size = np.maximum(np.abs(then), np.abs(then).mean())
    return np.where(np.abs(changes) <= NOISE * size, 0.0, changes)
