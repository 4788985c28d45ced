"""Identifies the samples that a version was trained and judged on, by numbers that stay the same between releases."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import ImageList
from flyte_ddp.datasets.prepared import PreparedSet, order_test_split
from flyte_ddp.datasets.rows import digest_bytes, digest_rows, digest_text, digest_texts, mix
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.files import replace_file
from flyte_ddp.objectives.objective import mean_losses
from flyte_ddp.release.evaluation import Evaluation
from flyte_ddp.samples.leaves import name_leaves
from flyte_ddp.shards.index import ShardIndex

SAMPLES = "samples.npz"  # of a version
NOISE = 0.01  # relative change of a sample's loss that threads and devices may cause

Digests = NDArray[np.uint64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class JudgedSamples:
    """The samples of a version's training and judgement, as identifying numbers, with the model's answers."""

    trained: Digests  # [N], validation samples included; empty: not known
    tested: Digests  # [n]; empty: not known
    answers: Floats  # [n], the result of list_answers()

    def write(self, path: Path) -> None:
        with replace_file(path) as file:
            np.savez_compressed(file, trained=self.trained, tested=self.tested, answers=self.answers)

    @classmethod
    def read(cls, content: bytes) -> "JudgedSamples":
        with np.load(io.BytesIO(content)) as stored:
            return cls(stored["trained"], stored["tested"], stored["answers"])


def identify_tested(data: PreparedSet, found: Evaluation) -> Digests:
    """Return an identifying number for each test sample that was evaluated. ``found`` is the evaluation.

    For image files the number is a digest of name and size, and for shards a digest of the id. For arrays it is a
    digest of the id, without ids of the table's row, and without a table of all inputs. The result is empty for samples
    on demand.
    """
    if not isinstance(data, EncodedSet):
        return identify_samples(data, "test")
    sizes = name_sizes(data.test_source)
    return digest_texts([f"{name} {sizes.get(name, '')}" for name in found.ids])


def identify_samples(data: PreparedSet, side: str) -> Digests:
    """Return an identifying number for each sample of a side, "train" or "test".

    The number is a digest of the id. Without ids, the digest is of the table's row, and without a table of all inputs.
    Equal samples without ids have equal numbers.

    Returns:
        For image files, digests of name and size of all samples that are not in the test split, whatever the side. For
        shards and samples on demand an empty array, because all samples would have to be read.
    """
    if isinstance(data, EncodedSet):
        if not isinstance(data.train, ImageList):
            return np.empty(0, np.uint64)
        order = order_test_split(data)
        tests = order.samples(slice(0, len(order))) if data.test is None else np.empty(0, np.int64)
        sizes = [f"{name} {size}" for name, size in name_sizes(data.train).items()]
        return digest_texts(np.delete(np.array(sizes), tests).tolist())
    if not isinstance(data, SampleArrays):
        return np.empty(0, np.uint64)
    ids = getattr(data, f"{side}_ids")
    if ids is not None:
        return digest_texts(ids.tolist())
    rows = data.load_rows(side)
    if rows is not None:
        return digest_rows(rows)
    total = np.zeros(getattr(data, f"{side}_samples"), np.uint64)
    for name, leaf in name_leaves(getattr(data, f"{side}_inputs")).items():
        contents = [digest_bytes(np.ascontiguousarray(leaf[place]).tobytes()) for place in range(len(leaf))]
        total += mix(np.array(contents, np.uint64) ^ digest_text(name))
    return total


def name_sizes(source: ShardIndex | ImageList) -> dict[str, int]:
    """Return the sizes of image files by name, or {} for shards.

    Names alone do not identify files, because a later release may use the same names for other files.
    """
    return dict(zip(source.names, source.sizes.tolist(), strict=True)) if isinstance(source, ImageList) else {}


def list_answers(found: Evaluation) -> Floats:
    """Return the quality of each sample's answer [n], which depends on the model and the sample alone.

    For classification, a right class is 1 and a wrong class is 0. For other objectives the quality is minus the loss.
    Scores are not used, because a pseudo-value depends on all samples of the split.
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
