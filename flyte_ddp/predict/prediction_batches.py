"""A saved model, and what it predicts, in batches: a folder of images, or the test split of a data set."""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flyte_ddp.catalog import IGNORED
from flyte_ddp.datasets import ImageArrays
from flyte_ddp.datasets.encoded_set import EncodedSet
from flyte_ddp.datasets.image_folder import SUFFIXES, file_kind, is_image, join_kinds, list_visible_files
from flyte_ddp.datasets.prepared import PlainSet, PreparedSet
from flyte_ddp.errors import UserError
from flyte_ddp.leaves import Leaves, call_with_leaves
from flyte_ddp.loading import cropping
from flyte_ddp.loading.collate import STACKED
from flyte_ddp.loading.decoding import DecodingError, decode_image, decode_with_pillow
from flyte_ddp.loading.encoded import BadSamples, EncodedImages
from flyte_ddp.loading.opening import open_test_split
from flyte_ddp.loading.opening_plain import open_plain_test_split
from flyte_ddp.loading.split import ImageSource
from flyte_ddp.machine import count_cores
from flyte_ddp.models import artifacts
from flyte_ddp.models.images import InputSpec, prepare_images
from flyte_ddp.models.input_text import describe_input
from flyte_ddp.models.inputs import LeavesSpec, prepare_inputs
from flyte_ddp.objectives.objective import convert_outputs
from flyte_ddp.objectives.own import objective_of_sidecar
from flyte_ddp.settings import Settings

BATCH_SIZE = 500  # images in memory at a time, unless the caller says how many


class SavedModel:
    """``model.pt`` and ``model.json`` of one run, loaded in evaluation mode to the GPU if there is one.

    ``settings`` say for the images of a data set where shards are cached, and how many threads decode. ``bad_samples``
    is how many images may be impossible to decode; None: as many as the model's training allowed. Runs the code that
    the sidecar names. Raises UserError if a file is missing or damaged, or the two do not belong together.
    """

    def __init__(self, weights: Path, sidecar: Path, settings: Settings, bad_samples: int | None = None) -> None:
        self.files = weights, sidecar
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.sidecar = artifacts.load_model(weights, sidecar, self.device)
        self.settings = settings
        self.bytes = weights.stat().st_size
        self.digest = str(self.sidecar["digests"]["weights"])  # SHA-256 of model.pt
        self.classes = [str(name) for name in self.sidecar["classes"]]
        self.objective = objective_of_sidecar(self.sidecar)
        self.spec = artifacts.parse_input_spec(self.sidecar)
        trained_with = int(self.sidecar.get("hyperparameters", {}).get("bad_samples", 0))
        self.bad_samples = trained_with if bad_samples is None else bad_samples

    @property
    def batch_size(self) -> int:
        """Samples that are predicted at a time: 500 images; of other inputs, which may be large, as in the training."""
        evaluated = int(self.sidecar.get("hyperparameters", {}).get("test_batch_size", BATCH_SIZE))
        return evaluated if isinstance(self.spec, LeavesSpec) else BATCH_SIZE

    def describe_input(self) -> str:
        """Return the model's input as text, as :func:`flyte_ddp.models.input_text.describe_input` does."""
        return describe_input(self.sidecar["input"])

    def require_images(self) -> InputSpec:
        """Return the model's input; raise UserError if the model does not take images."""
        if isinstance(self.spec, LeavesSpec):
            raise UserError(f"the model takes {self.describe_input()}, no images; give a data set of such samples")
        return self.spec

    def require_channels(self, dataset: str, channels: int) -> InputSpec:
        """Return the model's input; UserError if it takes no images, or not a data set's images of so many channels."""
        spec = self.require_images()
        if channels not in (1, spec.channels):
            raise UserError(
                f"data set {dataset!r} has {channels} channels: the model takes {spec.channels}; "
                "predict the data set that it was trained on, or one like it"
            )
        return spec

    def compute_outputs(self, inputs: Leaves) -> Any:
        """Run the model without gradients on a batch of at least one; return its outputs, fp32 or more."""
        with torch.no_grad():
            return convert_outputs(call_with_leaves(self.module, inputs), torch.float32)


class Batch(NamedTuple):
    """Samples to predict. Those that cannot be decoded have an id, but no input."""

    ids: Sequence[str]
    truths: Sequence[str] | None  # the classes of all samples, if they have one each, and it is known
    decoded: Sequence[bool]  # whether each sample could be decoded
    inputs: Leaves  # of the decoded samples, as the model gets them: images float32 [n, C, H, W] on the device
    targets: Leaves = None  # of all samples, if they are known and no class numbers: [N, ...] on the device


def find_images(folder: Path) -> tuple[list[Path], Mapping[str, int]]:
    """List a folder at all depths; return its image files, sorted, and counts of its other files by extension.

    Follows symlinks; skips hidden files. Raises UserError if the folder is missing, cannot be listed, or has no images.
    """
    if not folder.is_dir():
        raise UserError(f"images={folder}: must be a folder of images")
    names = [entry.name for entry in list_visible_files(str(folder.absolute()))]
    others = Counter(file_kind(name) for name in names if not is_image(name))
    if len(names) == others.total():
        found = f" but {join_kinds(others)}" if others else ""
        raise UserError(f"images={folder}: no image in it{found}; put {', '.join(SUFFIXES)} files there")
    return sorted(folder / name for name in names if is_image(name)), others


def read_folder_batches(
    model: SavedModel, folder: Path, paths: Sequence[Path], batch_size: int, bad: BadSamples
) -> Iterator[Batch]:
    """Read the image files at ``paths`` in order; yield batches of ``batch_size``, with ids relative to ``folder``.

    Images that cannot be decoded count for the size of a batch, and are recorded in ``bad``. Raises UserError if the
    model takes neither 1 nor 3 channels, a file cannot be read, or ``bad`` does not allow so many.
    """
    spec = model.require_images()
    if spec.channels not in (1, 3):
        raise UserError(
            f"the model takes {spec.channels} channels: image files have 1 or 3; predict a prepared data set instead"
        )
    middle = model.sidecar["input"].get("crop") == artifacts.MIDDLE
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        pixels = [read_pixels(path, spec, bad, middle=middle) for path in part]
        prepared = [prepare_images(image[None].to(model.device), spec) for image in pixels if image is not None]
        ids = [path.relative_to(folder).as_posix() for path in part]
        nothing = torch.empty(0, spec.channels, spec.height, spec.width, device=model.device)
        yield Batch(ids, None, [image is not None for image in pixels], torch.cat([nothing, *prepared]))


def read_pixels(path: Path, spec: InputSpec, bad: BadSamples, *, middle: bool) -> Tensor | None:
    """Read an image file and return its pixels uint8 [H, W, C]; None if they cannot be decoded, which ``bad`` records.

    If the model's evaluations used only the ``middle`` square of images, returns that in the model's size. Raises
    UserError if the file cannot be read, or ``bad`` does not allow one more.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); remove it, or make it readable") from error
    try:
        if middle:
            return torch.from_numpy(cropping.crop_to_square(decode_image(content), spec.height, share=spec.crop_share))
        pixels = decode_with_pillow(content, "L" if spec.channels == 1 else "RGB")
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], spec.channels))
    except DecodingError as error:
        bad.add_sample(str(path), str(error))
        return None


def read_test_split(
    model: SavedModel, data: PreparedSet, batch_size: int | None = None, bad: BadSamples | None = None
) -> Generator[Batch, None, None]:
    """Read the test split of a prepared data set, and return it as an iterator of batches of the model's inputs.

    Downloads remote shards into the cache. Undecodable images count for the size of a batch, and are recorded in
    ``bad`` (None: up to ``model.bad_samples``). Raises UserError for more, or images that the model does not take.
    """
    batch_size = model.batch_size if batch_size is None else batch_size
    if isinstance(data, ImageArrays):
        return read_array_batches(model, data, batch_size)
    if not isinstance(data, EncodedSet):
        return read_plain_batches(model, data, batch_size)
    return read_encoded_batches(model, data, batch_size, BadSamples(model.bad_samples) if bad is None else bad)


def read_array_batches(model: SavedModel, arrays: ImageArrays, batch_size: int) -> Generator[Batch, None, None]:
    """Yield the test split of arrays in batches; ids are indices.

    Raises UserError if the model takes other channels, or its labels or classes of pixels have other names.
    """
    spec = model.require_channels(arrays.name, arrays.test_images.shape[3])
    has_classes = arrays.test_labels.ndim == 1 and arrays.test_labels.dtype.kind in "iu"
    if not has_classes:
        require_same_names(model, arrays.name, arrays.classes)
    for start in range(0, len(arrays.test_images), batch_size):
        pixels = torch.from_numpy(np.array(arrays.test_images[start : start + batch_size])).to(model.device)
        targets = np.array(arrays.test_labels[start : start + batch_size])
        ids = [str(index) for index in range(start, start + len(targets))]
        truths = [arrays.classes[label] for label in targets] if has_classes else None
        others = None if has_classes else torch.from_numpy(targets).to(model.device)
        yield Batch(ids, truths, [True] * len(ids), prepare_images(pixels, spec), others)


def require_same_names(model: SavedModel, dataset: str, names: Sequence[str]) -> None:
    """Raise UserError unless a data set's classes or labels are the model's, in the same order, or it names none."""
    if names and [*names] != model.classes:
        raise UserError(
            f"data set {dataset!r} has the classes or labels {', '.join(names[:6])}: the model has "
            f"{', '.join(model.classes[:6]) or 'none'}; give data with the same, in the same order"
        )


def read_plain_batches(model: SavedModel, data: PlainSet, batch_size: int) -> Generator[Batch, None, None]:
    """Yield the test split of any leaves, or of pictures on demand, in batches; ids are indices.

    Leaves are collated as in the training. Loader processes of the user's own code end with the generator. Raises
    UserError if the model takes other inputs, or targets that are no class numbers have other names.
    """
    settings = model.sidecar.get("hyperparameters", {})
    collate = str(settings.get("collate", STACKED))
    threads = model.settings.loader_threads or count_cores()
    split, found, kind = open_plain_test_split(data, collate, int(settings.get("seed", 0)), model.device, threads)
    if isinstance(found, InputSpec):
        model.require_channels(data.name, found.channels)
    elif not isinstance(model.spec, LeavesSpec) or not model.spec.takes(found):
        raise UserError(
            f"data set {data.name!r} has {found.describe()}: the model takes {model.describe_input()}; predict "
            "the data set that it was trained on, or one like it"
        )
    has_classes = kind is not None and not kind.shape and kind.dtype.kind == "i" and bool(data.classes)
    if not has_classes:
        require_same_names(model, data.name, data.classes)
    with closing(split.source):
        for place, (inputs, targets, _) in split.load_evaluation_batches(batch_size, 0, 1):
            ids = [str(index) for index in range(place.start, place.stop)]
            truths = [name_class(data, label) for label in targets.tolist()] if has_classes else None
            prepared = prepare_inputs(inputs, model.spec)
            yield Batch(ids, truths, [True] * len(ids), prepared, None if has_classes else targets)


def name_class(data: PlainSet, label: int) -> str:
    """Return the name of a class number; UserError for a number without a name."""
    if not 0 <= label < len(data.classes):
        raise UserError(f"data set {data.name!r} has the class {label}: must be 0..{len(data.classes) - 1}")
    return data.classes[label]


def read_encoded_batches(
    model: SavedModel, data: EncodedSet, batch_size: int, bad: BadSamples
) -> Generator[Batch, None, None]:
    """Read the test split of shards, or of a folder of images, and yield it in batches, cropped as in evaluations.

    If the user's own code decoded the samples of the training, it decodes these, too. Starts decoding threads, or
    loader processes, which end with the generator. Downloads remote shards into the cache. Records undecodable
    images in ``bad``. Raises UserError for a model that does not take squares in colour, no samples, an unusable label
    or shard, or more undecodable images than ``bad`` allows.
    """
    spec = model.require_images()
    if spec.channels != 3 or spec.height != spec.width:
        raise UserError(
            f"dataset={data.name!r}: has colour images that become squares, and the model takes "
            f"{model.describe_input()}; predict with a model that was trained on such images"
        )
    names = data.classes or model.classes
    own = str(model.sidecar.get("hyperparameters", {}).get("sample", ""))
    tests, replaced = open_test_split(
        data, spec, len(names), bad, sample=own, device=model.device, settings=model.settings
    )
    images = tests.source
    with closing(images):
        for place, (pixels, targets, ids) in tests.load_evaluation_batches(batch_size, 0, 1):
            samples = tests.order.samples(place).tolist()
            decoded = [sample not in replaced for sample in samples]
            truths, others = None, None
            if targets.dim() > 1 or targets.is_floating_point():
                others = hide_targets(targets, decoded)
            else:
                truths = [
                    names[target] if good else name_class_of_undecoded(images, sample, names)
                    for target, good, sample in zip(targets.tolist(), decoded, samples, strict=True)
                ]
            inputs = prepare_images(pixels[torch.tensor(decoded)], spec)
            yield Batch(ids, truths, decoded, inputs, others)


def name_class_of_undecoded(images: ImageSource, sample: int, names: Sequence[str]) -> str:
    """Return the class of a sample whose image cannot be decoded; "" if the user's own code would have to find it."""
    return names[images.read_label(sample)] if isinstance(images, EncodedImages) else ""


def hide_targets(targets: Tensor, decoded: Sequence[bool]) -> Tensor:
    """Return targets [n, ...] with those of samples that are not ``decoded`` unknown: they are another sample's."""
    unknown = torch.nan if targets.is_floating_point() else IGNORED
    hidden = ~torch.tensor(decoded, device=targets.device)
    return targets.masked_fill(hidden.view(-1, *[1] * (targets.dim() - 1)), unknown)
