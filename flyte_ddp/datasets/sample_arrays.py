"""Data sets of arrays: one or more leaves of inputs and targets, of equal or different lengths."""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import atomic_write
from flyte_ddp.core.models.sidecar import FittedObject
from flyte_ddp.core.samples.class_names import normalize_class_names
from flyte_ddp.core.samples.leaves import (
    Leaves,
    Ragged,
    count_samples,
    get_leaves_form,
    map_leaves,
    name_leaves,
    restore_leaves,
)
from flyte_ddp.datasets import columns
from flyte_ddp.datasets.item_set import ItemSet
from flyte_ddp.datasets.leaf_conversion import (
    convert_inputs_and_ids,
    convert_leaves,
    convert_weights,
    is_class_numbers,
    name_class_numbers,
    number_truth_values,
    require_class_numbers,
    require_one_length,
    unify_sides,
)
from flyte_ddp.datasets.prepared_folder import (
    Description,
    read_array,
    read_description,
    read_weights,
    translate_damage_to_user_error,
)
from flyte_ddp.datasets.rows import digest_bytes, digest_rows, digest_text, digest_texts, mix
from flyte_ddp.models.preprocessing import pack_preprocessing

LEAVES = "leaves"  # key in the description of the forms of inputs and targets
IDS = ("train_ids", "test_ids")
PARTS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@dataclass(frozen=True)
class StoredRows:
    """Rows in a pickle of a prepared folder, loaded on demand."""

    path: Path

    def load(self) -> Any:
        """Return the rows. Raises UserError if unpickling fails.

        Unpickling imports the packages of the rows' types, and a manipulated file could run code.
        """
        try:
            return pickle.loads(self.path.read_bytes())
        except Exception as error:  # the packages that define the rows' types may raise anything
            fix = "install the packages that the data set uses, or delete the folder and fetch it again"
            raise UserError(f"{self.path}: the rows cannot be read ({type(error).__name__}: {error}); {fix}") from error


@dataclass(frozen=True, eq=False)
class SampleArrays(ItemSet):
    """A data set of arrays, made by :func:`arrays` or :func:`image_arrays`.

    Inputs and targets are leaves. A leaf is an array [N, ...] or a :class:`Ragged`. Several leaves form a tuple or a
    dict. The inputs of a set of pictures are one array uint8 [N, H, W, C]. ``digest`` is empty unless the set was
    opened by :func:`open_arrays`.
    """

    name: str
    train_inputs: Leaves
    train_targets: Leaves  # None if the set has no targets
    test_inputs: Leaves
    test_targets: Leaves
    classes: tuple[str, ...] = ()
    digest: str = ""
    sample_weights: NDArray[np.float64] | None = None
    not_finite: Mapping[str, int] = field(default_factory=dict)  # by file of targets: first sample with NaN or infinity
    train_ids: NDArray[np.str_] | None = None  # [N], names that the user has given to the samples
    test_ids: NDArray[np.str_] | None = None
    preprocessing: FittedObject = field(default_factory=FittedObject)
    rows: Mapping[str, Any] = field(default_factory=dict)  # by side: rows as they were read, or StoredRows
    mean: tuple[float, ...] = ()  # of each channel of the training pictures, scaled to 0..1 (else empty)
    std: tuple[float, ...] = ()

    @cached_property
    def pictures(self) -> bool:
        return bool(self.mean)

    def load_rows(self, side: str) -> Any:
        """Return the rows of the side "train" or "test" as the user's code has read them.

        Unpickles a file of the prepared folder. Returns None if no rows were kept.
        """
        kept = self.rows.get(side)
        return kept.load() if isinstance(kept, StoredRows) else kept

    @cached_property
    def train_samples(self) -> int:
        return count_samples(self.train_inputs)

    @cached_property
    def test_samples(self) -> int:
        return count_samples(self.test_inputs)

    def list_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by file name without ``.npy``: leaves, ends of ragged leaves, ids and weights.

        Examples of names are ``train_inputs``, ``train_inputs.NAME``, ``train_inputs.NAME.ends`` and ``test_ids``.
        """
        arrays = super().list_arrays()
        for part in PARTS:
            for name, leaf in name_leaves(getattr(self, part)).items():
                file = f"{part}.{name}" if name else part
                arrays |= {file: leaf.values, f"{file}.ends": leaf.ends} if isinstance(leaf, Ragged) else {file: leaf}
        ids = {name: getattr(self, name) for name in IDS}
        return arrays | {name: each for name, each in ids.items() if each is not None}

    def ids(self, side: str) -> NDArray[np.str_] | None:
        return self.train_ids if side == "train" else self.test_ids

    def stored_leaves(self, side: str) -> tuple[Leaves, Leaves]:
        sides = {"train": (self.train_inputs, self.train_targets), "test": (self.test_inputs, self.test_targets)}
        return sides[side]

    def training_targets(self) -> NDArray[Any] | None:
        return self.train_targets if isinstance(self.train_targets, np.ndarray) else None

    def read_item(self, side: str, sample: int, seed: int, epoch: int | None) -> tuple[Leaves, Leaves]:  # noqa: ARG002
        inputs, targets = (map_leaves(lambda leaf: leaf[sample], leaves) for leaves in self.stored_leaves(side))
        return inputs, targets

    def identify_samples(self, side: str) -> NDArray[np.uint64]:
        """Return a digest of each sample's id. Without ids, of the table's row, and without a table of all inputs."""
        if (ids := self.ids(side)) is not None:
            return digest_texts(ids.tolist())
        if (rows := self.load_rows(side)) is not None:
            return digest_rows(rows)
        inputs, _ = self.stored_leaves(side)
        total = np.zeros(count_samples(inputs), np.uint64)
        for name, leaf in name_leaves(inputs).items():
            contents = [digest_bytes(np.ascontiguousarray(leaf[place]).tobytes()) for place in range(len(leaf))]
            total += mix(np.array(contents, np.uint64) ^ digest_text(name))
        return total

    def compute_digests(self) -> tuple[str, str]:
        return arrays_sha256(self), arrays_sha256(self, test=True)

    def list_identity(self, *, test: bool) -> dict[str, NDArray[Any]]:
        """Return the arrays whose content identifies this data set.

        If ``test`` is True, return those of the test split.

        If rows were kept, hashes of the rows are added, and replace the inputs of the test split.
        """
        found = {name: each for name, each in self.list_arrays().items() if not test or name.startswith("test_")}
        # Prepared inputs depend on the fitted object, so equal rows would be another test split after each fit.
        if self.rows and test:
            found = {name: array for name, array in found.items() if not name.startswith("test_inputs")}
        sides = ("test",) if test else ("train", "test")
        return found | {f"{side}_rows": digest_rows(self.load_rows(side)) for side in sides if side in self.rows}

    def write_other_files(self, folder: Path) -> None:
        """Pickle the rows of each side, if rows were kept, into a file of the folder."""
        for side in self.rows:
            with atomic_write(rows_file(folder, side)) as file:
                file.write(pickle.dumps(self.load_rows(side)))

    def describe_content(self) -> Mapping[str, Any]:
        """Return the entries of ``dataset.json`` that only sets of arrays have.

        Among the entries are the forms of inputs and targets, and the first sample with NaN or infinity in each file of
        targets.
        """
        forms = {
            kind: {
                "form": get_leaves_form(leaves),
                "ragged": {name: isinstance(leaf, Ragged) for name, leaf in name_leaves(leaves).items()},
            }
            for kind, leaves in (("inputs", self.train_inputs), ("targets", self.train_targets))
        }
        stored = self.list_arrays()
        targets = [file for file in stored if file.partition(".")[0].endswith("_targets")]
        found = {file: columns.find_non_finite(stored[file], stored.get(f"{file}.ends")) for file in targets}
        rows = {file: at[0] for file, at in found.items() if at is not None}
        ids = [name for name in IDS if getattr(self, name) is not None]
        described = {LEAVES: forms, "ids": ids, "preprocessing": self.preprocessing, "rows": [*self.rows]}
        return described | {"not_finite": rows, "mean": self.mean, "std": self.std}

    @classmethod
    def open(cls, folder: Path, description: Description) -> Self:
        content, parts = description.content, dict[str, Leaves]()
        for part in PARTS:
            kind, named = content[LEAVES][part.rpartition("_")[2]], dict[str, NDArray[Any] | Ragged]()
            for name, ragged in kind["ragged"].items():
                file = f"{part}.{name}" if name else part
                values = read_array(folder, f"{file}.npy")
                named[name] = Ragged(values, read_array(folder, f"{file}.ends.npy")) if ragged else values
            parts[part] = restore_leaves(kind["form"], named)
        return cls(
            description.name,
            **parts,
            classes=description.classes,
            digest=description.digest,
            sample_weights=read_weights(folder, description),
            not_finite=content["not_finite"],
            **{name: read_array(folder, f"{name}.npy") for name in content.get("ids", ())},
            preprocessing=FittedObject.from_json_value(content["preprocessing"], "preprocessing"),
            rows={side: StoredRows(rows_file(folder, side)) for side in content.get("rows", ())},
            mean=tuple(content["mean"]),
            std=tuple(content["std"]),
        )


def arrays_sha256(data: SampleArrays, *, test: bool = False) -> str:
    """Return the SHA-256 (hex) of class names and identifying arrays. If ``test`` is True, hash only the test split."""
    digest = hashlib.sha256(json.dumps(data.classes).encode())
    for name, array in data.list_identity(test=test).items():
        digest.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.reshape(-1).data)
    return digest.hexdigest()


def arrays(
    train: Any,
    test: Any,
    *,
    classes: Sequence[str] = (),
    name: str = "",
    sample_weights: Any = None,
    preprocessing: Any = None,
    prepare: Callable[[Any, Any], Any] | None = None,
) -> SampleArrays:
    """Return a data set of tables, texts, series or other data that arrays can hold.

    Inputs and targets are a leaf, a tuple of leaves, or a dict of leaves by name. A leaf is an array, a table or a CPU
    tensor [N, ...] of numbers or truth values. A leaf may also be a list of N arrays [length, ...] of different
    lengths, for which ``collate`` must pad. The form of the inputs decides how the model is called: ``model(x)``,
    ``model(*leaves)`` or ``model(**leaves)``. Floats are stored as float32, and whole numbers are int64 in a batch.

    Args:
        train: Training samples, a pair (inputs, targets) or (inputs, targets, ids). Targets may be None. Ids [N] name
            the samples in errors, report and predictions.
        test: Test samples, in the same form.
        classes: Names of the classes if targets are class numbers or truth values [N] (default: "0", "1", ...).
        name: May be empty if the hyperparameter ``dataset`` names the callable that returns these arrays.
        sample_weights: Weights [N] of the training samples for ``sampling`` "weighted". Finite, at least 0, not all 0.
        preprocessing: Any object that can be pickled, for example fitted transformers. Saved in ``model.json``.
        prepare: A module-level function that is called with ``preprocessing`` and a source of new rows, and returns
            (inputs, ids or None).

    Raises:
        UserError: Leaves are no numbers, are empty or differ in length, or inputs are NaN or infinite. Also if float32
            cannot distinguish float64 values of training samples, names are reserved or no Python identifiers, or
            training and test samples have different forms. Also if ``preprocessing`` cannot be pickled, a class number
            is out of range, class names are equal, or weights are unfit.
    """
    for side, given in (("train", train), ("test", test)):
        if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
            rule = "must be a pair (inputs, targets), or (inputs, targets, ids)"
            raise UserError(f"{side}: {rule}, got {type(given).__name__}")
    packed = pack_preprocessing(preprocessing, prepare, columns.list_columns(train[0]))
    return make_arrays(train, test, classes=classes, name=name, sample_weights=sample_weights, packed=packed)


def make_arrays(
    train: Sequence[Any],
    test: Sequence[Any],
    *,
    classes: Sequence[str],
    name: str,
    packed: FittedObject,
    sample_weights: Any = None,
    rows: Mapping[str, Any] | None = None,
) -> SampleArrays:
    """Check training and test samples, and return the data set with its leaves as stored arrays.

    Unlike :func:`arrays`, the function does not check whether ``train`` and ``test`` are pairs or triples.

    Args:
        train: Training samples, (inputs, targets) or (inputs, targets, ids).
        test: Test samples, in the same form. Frames may have their columns in another order.
        classes: Names of the classes, or empty.
        name: The name of the data set, or "".
        packed: The fitted object, which may be empty.
        sample_weights: Weights [N] of the training samples, or None.
        rows: The rows behind the inputs of "train" and "test", if they are to be kept with the data set.

    Raises:
        UserError: Samples, names or weights are unfit, as for :func:`arrays`.
    """
    parts, ids = dict[str, Leaves](), dict[str, Any]()
    listed = columns.list_columns(train[0])
    test = [columns.order_frames("test_inputs", test[0], listed), *test[1:]]
    for side, given in (("train", train), ("test", test)):
        inputs, targets, named = (*given, None)[:3]
        # Only training samples are checked, because new rows and test rows may lie closer together.
        distinct = side == "train"
        parts[f"{side}_inputs"], ids[f"{side}_ids"] = convert_inputs_and_ids(
            f"{side}_", inputs, named, distinct=distinct
        )
        parts[f"{side}_targets"] = number_truth_values(convert_leaves(f"{side}_targets", targets, distinct=distinct))
        require_one_length({f"{side}_{kind}": parts[f"{side}_{kind}"] for kind in ("inputs", "targets")})
    for kind in ("inputs", "targets"):
        train_part, test_part = f"train_{kind}", f"test_{kind}"
        parts[train_part], parts[test_part] = unify_sides(kind, parts[train_part], parts[test_part])
    names = normalize_class_names("classes", classes) or name_class_numbers(parts)
    if names:
        for side in ("train", "test"):
            if is_class_numbers(targets := parts[f"{side}_targets"]):
                require_class_numbers(f"{side}_targets", targets, len(names))
    weights = convert_weights(sample_weights, count_samples(parts["train_inputs"]))
    kept = rows or {}
    return SampleArrays(name, **parts, classes=names, **ids, preprocessing=packed, sample_weights=weights, rows=kept)


def open_arrays(folder: Path) -> SampleArrays:
    """Open the prepared arrays in a folder. Arrays are memory-mapped, and rows are unpickled when needed.

    Files are not compared with their digests.

    Raises:
        UserError: The folder is damaged, or is no prepared data set.
    """
    description = read_description(folder)
    with translate_damage_to_user_error(folder):
        return SampleArrays.open(folder, description)


def rows_file(folder: Path, side: str) -> Path:
    return folder / f"{side}_rows.pkl"
