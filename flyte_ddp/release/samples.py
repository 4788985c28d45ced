"""Identifies the samples that a version was trained and judged on, by numbers that stay the same between releases."""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.files import replace_file
from flyte_ddp.core.objectives.objective import compute_mean_losses
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
    answers: Floats  # [n], the result of rate_answers()

    def write(self, path: Path) -> None:
        with replace_file(path) as file:
            np.savez_compressed(file, trained=self.trained, tested=self.tested, answers=self.answers)

    @classmethod
    def read(cls, content: bytes) -> "JudgedSamples":
        with np.load(io.BytesIO(content)) as stored:
            return cls(stored["trained"], stored["tested"], stored["answers"])


def rate_answers(found: Evaluation) -> Floats:
    """Return how good the model's answer on each sample is, [n]. Higher numbers are better.

    For classification, a right class is 1 and a wrong class is 0. For other objectives the number is minus the loss.
    The number depends on the model and the sample alone. The scores of the evaluation may be pseudo-values, which
    depend on all samples of the split.
    """
    return found.correct.astype(np.float64) if found.classifies else -compute_mean_losses(found.columns).numpy()


def match_samples(then: Digests, now: Digests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions in ``then``, and the positions in ``now``, of the samples that both arrays have.

    Both results have the same samples in the same order. Samples that occur twice in an array are skipped.
    """
    found = []
    for digests in (then, now):
        values, first, counts = np.unique(digests, return_index=True, return_counts=True)
        found.append((values[counts == 1], first[counts == 1]))
    _, *common = np.intersect1d(found[0][0], found[1][0], assume_unique=True, return_indices=True)
    places = [first[at] for (_, first), at in zip(found, common, strict=True)]
    return places[0], places[1]


def make_seen_sample_mask(tested: Digests, judged: Iterable[JudgedSamples]) -> NDArray[np.bool_]:
    """Return for each test sample whether one of the ``judged`` models was trained on the sample, [n].

    ``tested`` are the identifying numbers of the test samples, or empty if unknown. A number that a model has among the
    training and the test samples does not identify a sample. An example is a customer whose last month is in the test.
    """
    seen = np.zeros(len(tested), dtype=np.bool_)
    for each in judged:
        seen |= np.isin(tested, np.setdiff1d(each.trained, each.tested))
    return seen


def subtract_without_noise(now: Floats, then: Floats) -> Floats:
    """Return ``now`` minus ``then`` [n], with 0 for differences that rounding may have caused.

    Rounding may change a value by NOISE (1 %) of the value in ``then``, or of the mean absolute value if larger.
    """
    changes = now - then
    size = np.maximum(np.abs(then), np.abs(then).mean())
    return np.where(np.abs(changes) <= NOISE * size, 0.0, changes)
