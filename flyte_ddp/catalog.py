"""Data sets, models, measures and published weights that the configuration can name, and the image sizes of models.

The names are listed here because importing torch and torchvision takes over 2 s. Tests compare the lists with
torchvision.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.core.errors import UserError, unknown_name_error

# Each data set with the side of its square images, in pixels.
DATASETS: dict[str, int] = {"digits": 8, "mnist": 28, "fashion_mnist": 28, "cifar10": 32}


@dataclass(frozen=True)
class DataKind:
    """A kind of prepared data sets. A new kind is a subclass of PreparedSet in a new file, and an entry in KINDS."""

    set_class: str  # ``package.module:Class``, imported at first use
    prefix: str = ""  # before the address in the name of a data set; "" if user code or a published set gives the data
    key: str = ""  # in ``dataset.json``, by which a set without an address is recognised
    encoded: bool = False  # whether images stay encoded (JPEG, PNG) until a batch needs them


KINDS = (
    DataKind("flyte_ddp.datasets.sample_arrays:SampleArrays", key="leaves"),
    DataKind("flyte_ddp.datasets.on_demand_set:OnDemandSet", key="on_demand"),
    DataKind("flyte_ddp.datasets.encoded.shard_set:ShardSet", "shards", encoded=True),
    DataKind("flyte_ddp.datasets.encoded.shard_set:StreamSet", "stream", encoded=True),
    DataKind("flyte_ddp.datasets.encoded.image_folder:ImageFolderSet", "image_folder", encoded=True),
)
NO_ADDRESS = DataKind("")
WITH_ADDRESS = {kind.prefix: kind for kind in KINDS if kind.prefix}
DATASET_NAMES = (*DATASETS, *(f"{prefix}:ADDRESS" for prefix in WITH_ADDRESS), "package.module:callable")
ENCODED_SIDE = 224  # pixels: side of the squares that encoded images are resized to when image_size is 0
# Extensions of image files, and of images in shards: the formats that Pillow reads without other packages.
IMAGES = (
    *("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"),
    *("jpe", "jfif", "jp2", "apng", "avif"),
)

# Built-in objectives, each with the hyperparameters that only some objectives use.
SETTINGS_OF_OBJECTIVES: dict[str, tuple[str, ...]] = {
    "classification": ("label_smoothing", "class_weights", "threshold"),
    "multilabel": ("class_weights",),
    "regression": (),
    "segmentation": ("class_weights",),
    "language": (),
}
OF_CLASSES = ("classification", "segmentation", "language")  # objectives that need to know the number of classes
OF_LENGTHS = ("language",)  # objectives whose targets may have different lengths
CODE_OPTIONS = {"language": "decode"}  # objectives with an option that names a user-defined callable

# Measures of the built-in objectives, beside the loss. In classification, OF_TWO_CLASSES need exactly two classes.
OF_TWO_CLASSES = ("auroc", "average_precision")
MEASURES: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "f1", *OF_TWO_CLASSES),
    "multilabel": ("f1", "auroc", "average_precision", "balanced_accuracy"),
    "regression": ("rmse", "mae", "r2"),
    "segmentation": ("miou", "pixel_accuracy"),
    "language": ("perplexity", "token_accuracy"),
}

# The two small CNNs, each with the smallest image side that it accepts, in pixels.
SMALL_MODELS: dict[str, int] = {"small_cnn": 8, "tutorial": 16}
# Side lengths that must divide the image side, for transformers that cut images into patches or windows.
SIZE_MULTIPLES = {"maxvit_t": 224, "vit_b_16": 16, "vit_b_32": 32, "vit_h_14": 14, "vit_l_16": 16, "vit_l_32": 32}
# The smallest image side, in pixels, with which a forward pass in training mode works, by families of models.
SMALLEST_SIDES: dict[str, int] = {
    "alexnet": 63, "convnext": 32, "densenet": 29, "googlenet": 15, "inception": 75, "squeezenet1_0": 21,
    "squeezenet1_1": 17, "vgg": 32, **SIZE_MULTIPLES,
}  # fmt: skip
ANY_SIDE = 8  # pixels: smallest side for models that accept any size; smaller images show nothing

# torchvision's image classifiers, each with its published weights by name, the best first. An entry has the file, the
# side in pixels of the model's square input, and the shorter side of the image from whose centre the square is cut.
TORCHVISION_WEIGHTS: dict[str, dict[str, tuple[str, int, int]]] = json.loads(
    Path(__file__).with_name("torchvision_weights.json").read_bytes()
)
# torchvision's image classifiers, each with its smallest image side.
TORCHVISION_MODELS: dict[str, int] = {
    model: next((side for family, side in SMALLEST_SIDES.items() if model.startswith(family)), ANY_SIDE)
    for model in TORCHVISION_WEIGHTS
}
# Prefix of the names of torchvision's weights in init_from, and the address of all weights files.
TORCHVISION_PREFIX = "torchvision:"
TORCHVISION_ADDRESS = "https://download.pytorch.org/models"
TORCHVISION_CLASSES = 1000  # of ImageNet, on which all weights were trained
DEFAULT = "DEFAULT"  # torchvision's name for the best weights of a model, which are the first in the table
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and std of values in 0..1
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
# Mean and std that are not IMAGENET, by the start of the weights' file name. For Google's two models torchvision
# normalises images by IMAGENET, and the models convert the images to HALF.
OTHERS = {"efficientnet_v2_l": HALF, "googlenet": HALF, "inception_v3": HALF}
OTHERS |= {"vgg16_features": ((0.48235, 0.45882, 0.40784), (1 / 255,) * 3)}

MODELS: tuple[str, ...] = (*SMALL_MODELS, *TORCHVISION_MODELS)
MODELS_PAGE = "https://docs.pytorch.org/vision/stable/models.html"  # lists torchvision's models


@dataclass(frozen=True)
class PretrainedWeights:
    """A torchvision weights file, and the form of its training images (RGB, ``side`` x ``side`` pixels).

    ``mean`` and ``std`` refer to values in 0..1. ``crop_share`` is the share of an image's shorter side that the square
    covers.
    """

    file: str
    side: int
    crop_share: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def digest_start(self) -> str:
        """First digits (8 or more, hex) of the file's SHA-256, read from the end of the file's name."""
        return self.file.removesuffix(".pth").rpartition("-")[2]


def find_kind(dataset: str) -> DataKind:
    """Return the kind of a data set such as ``shards:ADDRESS``. Returns NO_ADDRESS for other names."""
    prefix, _, address = dataset.partition(":")
    return WITH_ADDRESS.get(prefix, NO_ADDRESS) if address else NO_ADDRESS


def check_image_size(model: str, height: int, width: int) -> None:
    """Raise UserError if a built-in model does not accept images of this size in pixels.

    The error suggests a size. User-defined models are not checked.
    """
    if ":" in model:
        return
    smallest = {**SMALL_MODELS, **TORCHVISION_MODELS}.get(model, 1)
    multiple = SIZE_MULTIPLES.get(model, 1)
    if min(height, width) < smallest or height % multiple or width % multiple:
        rule = f"sides must be at least {smallest}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
    elif model.startswith("vit_") and height != width:
        rule = "images must be square"
    else:
        return
    fits = -(-max(smallest, height, width) // multiple) * multiple
    raise UserError(f"model {model!r} does not accept {height}x{width} images: {rule}; set image_size={fits}")


def choose_image_side(image_size: int, weights: PretrainedWeights | None) -> int:
    """Return the side of a model's square input images, in pixels: ``image_size``, or the side of the weights if 0.

    If ``image_size`` is 0 and no weights are given, returns 0.
    """
    return image_size or (weights.side if weights else 0)


def find_torchvision_weights(model: str, init_from: str) -> PretrainedWeights | None:
    """Return the torchvision weights that ``init_from`` names as ``torchvision:NAME``, else None.

    DEFAULT is the name of the model's best weights.

    Raises:
        UserError: The model is not a torchvision model, or has no weights of this name.
    """
    if not init_from.startswith(TORCHVISION_PREFIX):
        return None
    if model not in TORCHVISION_MODELS:
        raise UserError(
            f"init_from={init_from!r}: requires a torchvision model, not {model!r}; set model to a torchvision model, "
            "such as resnet18, or init_from to a file of weights"
        )
    known = TORCHVISION_WEIGHTS[model]
    named = {DEFAULT: next(iter(known.values())), **known}
    name = init_from.removeprefix(TORCHVISION_PREFIX)
    if name not in named:
        raise unknown_name_error(f"init_from for {model}:", init_from, [f"{TORCHVISION_PREFIX}{one}" for one in named])
    file, side, shorter_side = named[name]
    mean, std = next((values for start, values in OTHERS.items() if file.startswith(start)), IMAGENET)
    return PretrainedWeights(file, side, side / shorter_side, mean, std)


def check_select_by(select_by: str, objective: str, classes: int = 2) -> None:
    """Raise UserError if ``select_by`` is neither "loss" nor a measure of ``objective``.

    If the number of ``classes`` is above 2, measures of two classes are rejected. User-defined objectives are not
    checked.
    """
    if objective in MEASURES:
        unfit = OF_TWO_CLASSES if objective == "classification" and classes > 2 else ()
        choices = ["loss", *(name for name in MEASURES[objective] if name not in unfit)]
        if select_by in unfit:
            raise UserError(
                f"select_by={select_by!r}: requires two classes, not {classes}; choose {', '.join(choices)}"
            )
        if select_by not in choices:
            raise unknown_name_error("select_by", select_by, choices)


def parse_threshold(text: str) -> tuple[str, float]:
    """Split the hyperparameter ``threshold`` into its rule and number.

    Returns:
        "f1" and 0, "recall" or "cost" and the number after "=", or "fixed" and a probability.

    Raises:
        UserError: ``text`` is none of f1, recall=R, cost=C and a probability.
    """
    rule, equals, number = text.rpartition("=") if text != "f1" else (text, "=", "0")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    rule = rule if equals else "fixed"
    fits = {"f1": value == 0, "recall": 0 < value <= 1, "cost": 0 < value < math.inf, "fixed": 0 < value < 1}
    if not fits.get(rule, False):
        raise UserError(
            f"threshold={text!r}: must be f1, recall=R with R above 0 and at most 1, cost=C with C above 0, or a "
            "probability between 0 and 1"
        )
    return rule, value


def check_two_classes(threshold: str, classes: int) -> None:
    if classes != 2:
        raise UserError(f"threshold={threshold!r}: needs two classes, not {classes}; omit threshold")


def check_positives_for_threshold(threshold: str, positive: str, positives: int) -> None:
    """Raise UserError if ``threshold`` must be fitted, but the validation split has no positive sample.

    A threshold that is a probability is not fitted. ``positive`` is the name of the positive class, and ``positives``
    is the number of its samples.
    """
    if not positives and parse_threshold(threshold)[0] != "fixed":
        raise UserError(
            f"threshold={threshold!r}: is fitted on the validation split, which has no sample of class {positive!r}; "
            "raise validation_fraction, or give a probability"
        )
