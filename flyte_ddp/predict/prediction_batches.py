"""A saved model, and batches of samples to predict: images of a folder, or a data set's test split."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.loading.loader_threads import limit_to_one_thread
from flyte_ddp.core.lookahead import map_in_threads
from flyte_ddp.core.machine.resources import count_cores
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.inputs import InputSpec, prepare_inputs, translate_input_errors
from flyte_ddp.core.models.sidecar import MIDDLE
from flyte_ddp.core.objectives.objective import convert_float_tensors, map_float_tensors
from flyte_ddp.core.samples.leaves import IGNORED, Leaves, call_with_leaves
from flyte_ddp.core.settings import Settings
from flyte_ddp.datasets.collate import STACKED
from flyte_ddp.datasets.encoded import cropping
from flyte_ddp.datasets.encoded.decoding import DecodingError, decode_image, decode_with_pillow
from flyte_ddp.datasets.encoded.image_list import SUFFIXES, is_image, list_visible_files
from flyte_ddp.datasets.encoded.samples import BadSamples
from flyte_ddp.datasets.prepared_set import Opening, PreparedSet
from flyte_ddp.datasets.rows import MISSING, normalize_columns
from flyte_ddp.datasets.sample_arrays import SampleArrays
from flyte_ddp.datasets.table import UNKNOWN
from flyte_ddp.models import artifacts
from flyte_ddp.objectives import make_objective_of_saved_model
from flyte_ddp.predict.new_rows import cast_leaves_if_exact, prepare_test_inputs

WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BATCH_SIZE = 500  # images in memory at a time, by default


class SavedModel:
    """A run's ``model.pt`` and ``model.json``, loaded for evaluation with the sidecar's code.

    The model is on the GPU if available. The constructor draws random numbers, and raises UserError if the files do not
    fit or are damaged. ``bad_samples`` is how many images may fail to decode. By default the limit of the model's
    training holds.
    """

    def __init__(self, weights: Path, sidecar: Path, settings: Settings, bad_samples: int | None = None) -> None:
        self.files = weights, sidecar
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.sidecar = artifacts.load_model(weights, sidecar, self.device)
        self.settings, self.threads = settings, settings.loaders or count_cores()
        self.digest = self.sidecar.digests.weights  # SHA-256 of model.pt
        self.classes = [*self.sidecar.classes]
        self.order: list[int] | None = None  # the place of each class in the module's outputs; None: the same order
        self.objective = make_objective_of_saved_model(self.sidecar)
        self.spec = saving.make_input_spec(self.sidecar.input)
        self.hyperparameters = self.sidecar.hyperparameters  # of the training
        self.collate, self.seed = (
            str(self.hyperparameters.get("collate", STACKED)),
            int(self.hyperparameters.get("seed", 0)),
        )
        self.bad_samples = int(self.hyperparameters.get("bad_samples", 0)) if bad_samples is None else bad_samples
        # Samples at a time: 500 images. Other inputs may be large, so the training's test batch size is used.
        evaluated = int(self.hyperparameters.get("test_batch_size", BATCH_SIZE))
        self.batch_size = BATCH_SIZE if self.spec.pictures else evaluated

    def unfit_data_error(self, what: str) -> UserError:
        accepted = self.sidecar.input.describe()
        return UserError(f"{what}, but the model accepts {accepted}; give data like the training data")

    def make_test_opening(self, classes: int = 0, bad: BadSamples | None = None) -> Opening:
        """Return the options with which a data set's test split is opened for this model.

        ``classes`` is the number of classes of encoded images. Images that cannot be decoded are added to ``bad``.
        """
        sample = str(self.hyperparameters.get("sample", ""))
        return Opening(self.device, self.settings, self.spec, classes, sample, self.collate, self.seed, bad)

    def set_class_order(self, names: Sequence[str]) -> None:
        """Set the order of the model's classes, and of the columns of its outputs, to ``names``.

        ``names`` must be the model's classes in any order.
        """
        trained = [*self.sidecar.classes]
        self.order = None if [*names] == trained else [trained.index(name) for name in names]
        self.classes = [*names]

    def compute_outputs(self, inputs: Leaves) -> Any:
        """Return the model's outputs for a batch of at least one sample, in fp32 or more, without gradients.

        The columns of classes are in the order of ``classes``.

        Raises:
            UserError: The model does not accept the inputs.
        """
        with torch.no_grad(), translate_input_errors(self.sidecar.model, self.module, inputs):
            outputs = convert_float_tensors(call_with_leaves(self.module, inputs), torch.float32)
        if self.order is None:
            return outputs
        return map_float_tensors(outputs, lambda values: values[:, self.order])


class Batch(NamedTuple):
    """Samples to predict. Samples that cannot be decoded have an id, but no input."""

    ids: Sequence[str]
    truths: Sequence[str] | None  # the classes of all samples, if each sample has a class
    decoded: Sequence[bool]  # whether each sample could be decoded
    inputs: Leaves  # of the decoded samples, in the model's form: images float32 [n, C, H, W] on the device
    targets: Leaves = None  # of all samples, unless unknown or class numbers: [N, ...] on the device
    rows: Mapping[str, NDArray[Any]] = {}  # of the decoded samples, as they were read: numbers or texts [n] by column


def list_image_files(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted. Hidden files are skipped.

    Raises:
        UserError: The folder does not exist, or has no images.
    """
    if not folder.is_dir():
        raise UserError(f"images={folder}: must be a folder of images")
    names = [entry.name for entry in list_visible_files(str(folder.absolute()))]
    images = sorted(folder / name for name in names if is_image(name))
    if not images:
        raise UserError(
            f"images={folder}: none of its {len(names):,} files is an image; add {', '.join(SUFFIXES)} files"
        )
    return images


def read_image_batches(
    model: SavedModel, folder: Path, paths: Sequence[Path], batch_size: int, bad: BadSamples
) -> Iterator[Batch]:
    """Yield the image files at ``paths`` as batches of model inputs, with ids relative to ``folder``.

    Threads decode images ahead, and scale them to the model's size. Each thread holds one large image at a time. Images
    that cannot be decoded count for the size of a batch, and are added to ``bad``.

    Raises:
        UserError: More images cannot be decoded than ``bad`` allows. At the first ``next()``, the model does not accept
            images of 1 or 3 channels.
    """
    spec = model.spec
    if not isinstance(spec, InputSpec) or spec.channels not in (1, 3):
        raise model.unfit_data_error(f"images={folder}: has images of 1 or 3 channels")
    middle = getattr(model.sidecar.input, "crop", "") == MIDDLE

    def read_input(path: Path) -> Tensor | DecodingError:
        """Return an image file as the model's input, or the error if the image cannot be decoded."""
        try:
            return cast(
                "Tensor", prepare_inputs(read_image_pixels(path, spec, middle=middle)[None].to(model.device), spec)
            )
        except DecodingError as error:
            return error

    with map_in_threads(read_input, paths, model.threads, initializer=limit_to_one_thread) as found:
        for start in range(0, len(paths), batch_size):
            part = [*zip(paths[start : start + batch_size], found, strict=False)]
            for path, image in part:
                if isinstance(image, DecodingError):
                    bad.add_sample(str(path), str(image))
            inputs = [image for _, image in part if isinstance(image, Tensor)]
            ids = [path.relative_to(folder).as_posix() for path, _ in part]
            decoded = [isinstance(image, Tensor) for _, image in part]
            yield Batch(ids, None, decoded, torch.cat(inputs) if inputs else None)


def read_image_pixels(path: Path, spec: InputSpec, *, middle: bool) -> Tensor:
    """Return the pixels of an image file, uint8 [H, W, C], in grey or RGB as the model needs.

    If ``middle`` is True, returns only the middle square in RGB, resized to the model's size.

    Raises:
        DecodingError: The image cannot be decoded.
    """
    content = path.read_bytes()
    if middle:
        return torch.from_numpy(cropping.crop_to_square(decode_image(content), spec.height, share=spec.crop_share))
    pixels = decode_with_pillow(content, "L" if spec.channels == 1 else "RGB")
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], spec.channels))


def read_test_batches(
    model: SavedModel, data: PreparedSet, batch_size: int | None = None, bad: BadSamples | None = None
) -> Generator[Batch, None, None]:
    """Yield the test split of a prepared data set, in batches of model inputs.

    If the model has a preprocessing, its code makes the inputs of the rows. Ids are the keys of encoded images, the
    user's ids, or the numbers of samples. Images that cannot be decoded count for the size of a batch, and are added to
    ``bad``. By default up to ``model.bad_samples`` images may fail, and ``batch_size`` is the model's. Starts loaders,
    which end when the generator is closed.

    Raises:
        UserError: The model does not accept the inputs, another preprocessing made the inputs, or the targets have
            other names than the model's. More images cannot be decoded than allowed.
    """
    if isinstance(data, SampleArrays) and not data.pictures:
        data = prepare_test_inputs(model.sidecar, data)
    yield from read_prepared_batches(model, data, batch_size, bad)


def read_prepared_batches(
    model: SavedModel, data: PreparedSet, batch_size: int | None = None, bad: BadSamples | None = None
) -> Generator[Batch, None, None]:
    """Yield the test split of a data set in batches, without calling the model's preprocessing.

    Otherwise the same as :func:`read_test_batches`, with the same errors.
    """
    spec, bad = model.spec, BadSamples(model.bad_samples) if bad is None else bad
    if data.crop and not (isinstance(spec, InputSpec) and spec.channels == 3 and spec.height == spec.width):
        raise model.unfit_data_error(f"dataset={data.name!r}: has colour images, which are cropped to squares")
    if isinstance(data, SampleArrays):
        types = {name: leaf.dtype for name, leaf in spec.leaves}
        train, test = (cast_leaves_if_exact(inputs, types) for inputs in (data.train_inputs, data.test_inputs))
        data = replace(data, train_inputs=train, test_inputs=test)
    names = [*data.classes] or ([] if data.named_targets else model.classes)
    split, found = data.open_test_split(model.make_test_opening(len(names), bad))
    if not spec.accepts(found):
        raise model.unfit_data_error(f"data set {data.name!r} has {found.describe()}")
    read = data.load_rows("test")
    rows = {} if read is None else normalize_columns(read)
    with closing(split.source):
        for place, (loaded, targets, keys) in split.load_evaluation_batches(batch_size or model.batch_size, 0, 1):
            samples = split.order.samples_at(place).tolist()
            replaced = split.source.replaced_samples()
            decoded = [sample not in replaced for sample in samples]
            truths, others = list[str](), targets
            if names and isinstance(targets, Tensor) and targets.dim() == 1 and targets.dtype in WHOLE_NUMBERS:
                truths, others = [get_class_name(data.name, label, names) for label in targets.tolist()], None
            elif data.named_targets:
                others = reorder_targets(model, data.name, names, targets)
            if not all(decoded):
                loaded = loaded[torch.tensor(decoded)]  # noqa: PLW2901
                others = None if truths else mask_undecoded_targets(others, decoded)
            for at, sample in enumerate(samples if truths else ()):
                if not decoded[at]:  # truths[at] is a substitute's class; the true class may need the user's code
                    label = split.source.read_label(sample)
                    truths[at] = "" if label is None else names[label]
            ids, inputs = keys or [*map(str, samples)], prepare_inputs(loaded, spec)
            of_rows = {name: values[samples] for name, values in rows.items()}
            yield Batch(ids, truths or None, decoded, inputs, others, of_rows)


def reorder_targets(model: SavedModel, dataset: str, names: Sequence[str], targets: Leaves) -> Leaves:
    """Return labels [n, K] or masks with the data set's class numbers replaced by the model's. Classes match by name.

    ``names`` are the data set's classes. If they are empty or in the model's order, returns ``targets``. ``dataset``
    names the data set in errors.

    Raises:
        UserError: The data set's classes or labels are not the model's.
    """
    if not names or [*names] == model.classes:
        return targets
    if sorted(names) != sorted(model.classes) or not isinstance(targets, Tensor):
        raise UserError(
            f"data set {dataset!r} has the classes or labels {', '.join(names[:6])}, but the model has "
            f"{', '.join(model.classes[:6]) or 'none'}; give data with the same names"
        )
    if targets.is_floating_point():
        return targets[:, [names.index(name) for name in model.classes]]
    places = torch.arange(max(IGNORED + 1, len(names)), device=targets.device)
    places[: len(names)] = torch.tensor([model.classes.index(name) for name in names], device=targets.device)
    return places[targets.long()]


def get_class_name(dataset: str, label: int, names: Sequence[str]) -> str:
    """Return the name of a class number, or MISSING for the number UNKNOWN.

    ``dataset`` names the data set in errors.

    Raises:
        UserError: Another number is not below the number of names.
    """
    if label == UNKNOWN:
        return MISSING
    if not 0 <= label < len(names):
        raise UserError(f"data set {dataset!r} has the class {label}: must be 0..{len(names) - 1}")
    return names[label]


def mask_undecoded_targets(targets: Tensor, decoded: Sequence[bool]) -> Tensor:
    """Return a copy of the targets [n, ...] with unknown values for samples that are not ``decoded``.

    An unknown value is NaN, or IGNORED for whole numbers. In ``targets``, the rows of these samples have the targets of
    other samples, because the loader substitutes samples that cannot be decoded.
    """
    unknown = torch.nan if targets.is_floating_point() else IGNORED
    hidden = ~torch.tensor(decoded, device=targets.device)
    return targets.masked_fill(hidden.view(-1, *[1] * (targets.dim() - 1)), unknown)
