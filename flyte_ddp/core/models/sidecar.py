"""The sidecar of a saved model, ``model.json``. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flyte_ddp.core.checks.parsing import JsonObject, parse_json
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.errors import UserError

FORMAT = "flyte-ddp-model/1"
CLASSIFICATION = "classification"  # the objective of a sidecar that names none
EVALUATION_SHARE = 224 / 256  # usual share of an encoded image's shorter side that evaluations use, as for ImageNet
MIDDLE = "middle"  # the ``crop`` of a model that was evaluated on the middle square of images
FIX = "give the model.json of a finished run"
Side = Annotated[int, range(1, 2**16)]


@dataclass(frozen=True)
class Leaf(JsonRecord):
    """One leaf of a sample's inputs."""

    shape: list[Count | None]  # without the samples' dimension, and None where lengths differ between samples
    dtype: Annotated[str, {"float", "int64", "bool", "other"}]


@dataclass(frozen=True)
class LeavesInput(JsonRecord):
    """A model's inputs that are no images: the form, and each leaf by name."""

    form: Annotated[str, {"leaf", "tuple", "dict", "none"}]
    leaves: Mapping[str, Leaf]

    def describe(self) -> str:
        texts = []
        for name, leaf in self.leaves.items():
            shape = " x ".join("?" if size is None else str(size) for size in leaf.shape)
            texts.append(f"{name} {leaf.dtype} [{shape}]".strip())
        return ", ".join(texts)


@dataclass(frozen=True, kw_only=True)
class ImageInput(JsonRecord):
    """Images as a model's input, and the steps by which other programs prepare an image, in order (docs/model.md)."""

    channels: Side
    height: Side
    width: Side
    mean: list[float]
    std: list[float]
    crop: str | None = None  # MIDDLE or ""
    upright: bool = True  # an image is rotated as its EXIF data say
    background: list[Count] = field(default_factory=list)  # RGB, behind the transparent parts of an image
    mode: str | None = None  # Pillow's name of the colour space
    # The middle square's side / the image's shorter side. None: evaluations use the whole image.
    crop_share: float | None = EVALUATION_SHARE
    resize_dtype: str = "float32"  # type of the resized values: uint8 rounds them
    interpolation: str = "bilinear"
    antialias: bool = True
    scale: float = 1 / 255

    def describe(self) -> str:
        return f"{self.channels} x {self.height} x {self.width}"


@dataclass(frozen=True, kw_only=True)
class Metrics(JsonRecord):
    """The measures of the kept weights."""

    test: Mapping[str, float | None] = field(
        default_factory=dict, metadata={"prefix": "test_"}
    )  # by measure, the main measure first; None: not finite
    # The main measure after each evaluation, by its name, or by "accuracies".
    history: Mapping[str, list[float | None]] = field(default_factory=dict, metadata={"prefix": "epoch_"})
    kept_epoch: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Digests(JsonRecord):
    """SHA-256 of the parts that a model was made from, and of the weights. Empty: not used, or not known yet."""

    data: str = ""  # the prepared data set
    code: str = ""  # this library
    user_code: str = ""
    init_from: str = ""  # the initial weights
    weights: str  # model.pt


@dataclass(frozen=True, kw_only=True)
class FittedObject(JsonRecord):
    """A pickled object that was fitted to a data set, and the name of the user code that uses the object.

    The user code makes inputs of rows. All fields are empty if nothing was fitted.
    """

    releases: str = ""  # of the installed packages
    sha256: str = ""  # of the pickle
    pickle: str = ""  # in base64
    prepare: str = ""  # package.module:function of the object and a source of new rows
    table: str = ""  # package.module:Class of the Table, in place of ``prepare``
    rows: list[str] = field(default_factory=list)  # the columns that the Table has read
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each frame, by the name of the leaf
    numbered: bool | None = None  # whether whole numbers as targets are positions in ``Table.classes``

    def describe(self) -> str:
        kind = "Table's preprocessing" if self.table else "preprocessing"
        return f"{kind} {self.sha256[:12]}" if self.sha256 else "no preprocessing"


@dataclass(frozen=True, kw_only=True)
class Sidecar(JsonRecord):
    """How to build and use a saved model, its measures, and where the model comes from."""

    format: Annotated[str, {FORMAT}] = FORMAT
    model: str  # a name, or package.module:callable
    classes: list[str]  # in the order of the outputs
    objective: str = CLASSIFICATION
    outputs: Count | None = None  # the size of the last layer; None: one output for each class
    target_shape: list[Count] | None = None
    class_weights: list[float] | None = None
    threshold: float | None = None  # least probability of the second of two classes for predicting this class
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by "model", "objective" and others
    input: LeavesInput | ImageInput
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # of the release that trained the model
    metrics: Metrics = field(default_factory=Metrics)
    digests: Digests
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python and libraries, by name
    num_ranks: Count | None = None
    num_nodes: Count | None = None
    threads_per_rank: Count | None = None
    sources: Mapping[str, str] = field(default_factory=dict)  # of user code, by path; used by load_model
    preprocessing: FittedObject = field(default_factory=FittedObject)

    def to_json_value(self) -> JsonObject:
        values = super().to_json_value()
        if self.objective == CLASSIFICATION:
            del values["objective"]
        return values


def read_sidecar(path: Path) -> Sidecar:
    """Read a ``model.json``, and return its content. Does not import the user code that the file names.

    Raises:
        UserError: The file is missing, is not JSON, has another format, or has a value of another type.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read sidecar {path}: {error.strerror}; {FIX}") from error
    return parse_sidecar(content, f"sidecar {path}")


def parse_sidecar(content: bytes, where: str) -> Sidecar:
    """Return the sidecar from the bytes of a ``model.json``. Does not import the user code that the file names.

    Raises:
        UserError: The content is not JSON, has another format, or has a value of another type. The error begins with
            ``where``.
    """
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); {FIX}") from error
    form = value.get("format") if isinstance(value, dict) else None
    if form != FORMAT:
        raise UserError(f"{where} has format {form!r}: must be {FORMAT!r}; {FIX}")
    return Sidecar.from_json_value(value, f"{where} is damaged, so {FIX}")
