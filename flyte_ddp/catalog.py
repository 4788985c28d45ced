"""Names of data sets and models that configuration may use, and the image sizes that models can take.

Written down here, because importing torch and torchvision takes over 2 s. Tests compare them with torchvision's own.
"""

import json
from pathlib import Path

from flyte_ddp.errors import UserError

# Each data set with the side of its square images, in pixels.
DATASETS: dict[str, int] = {"digits": 8, "mnist": 28, "fashion_mnist": 28, "cifar10": 32}
# The other forms that a data set's name may have.
DATASET_FORMS = ("shards:ADDRESS", "stream:ADDRESS", "image_folder:ADDRESS", "package.module:callable")
ENCODED_KINDS = ("shards", "stream", "image_folder")  # images stay encoded (JPEG, PNG) until a batch needs them
IGNORED_TOKEN = -100  # in texts, the target of places that do not count, as in torch's cross-entropy
IGNORED = 255  # in masks, the class number of pixels that do not count
ENCODED_SIDE = 224  # pixels: side of the squares that encoded images are resized to when image_size is 0
# Extensions of image files, and of images in shards: the formats that Pillow reads without other packages.
IMAGES = (
    *("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"),
    *("jpe", "jfif", "jp2", "apng", "avif"),
)

# Built-in objectives, each with the hyperparameters that some objectives use, and it does.
SETTINGS_OF_OBJECTIVES: dict[str, tuple[str, ...]] = {
    "classification": ("label_smoothing", "class_weights"),
    "multilabel": ("class_weights",),
    "regression": (),
    "segmentation": ("class_weights",),
    "language": (),
}
OF_CLASSES = ("classification", "segmentation", "language")  # objectives of class numbers, whose number must be known
OF_TEXTS = ("language",)  # objectives whose targets may have different lengths
CODE_OPTIONS = {"language": "decode"}  # objectives with an option that names the user's own callable

# Their measures, beside the loss; of classification those of OF_TWO_CLASSES need two.
OF_TWO_CLASSES = ("auroc", "average_precision")
MEASURES: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "balanced_accuracy", "f1", *OF_TWO_CLASSES),
    "multilabel": ("f1", "auroc", "average_precision", "balanced_accuracy"),
    "regression": ("rmse", "mae", "r2"),
    "segmentation": ("miou", "pixel_accuracy"),
    "language": ("perplexity", "token_accuracy"),
}

# The two small CNNs, each with the smallest image side that it takes, in pixels.
SMALL_MODELS: dict[str, int] = {"small_cnn": 8, "tutorial": 16}
# Side lengths that must divide the image side: transformers that cut images into patches or windows of a fixed size.
SIZE_MULTIPLES = {"maxvit_t": 224, "vit_b_16": 16, "vit_b_32": 32, "vit_h_14": 14, "vit_l_16": 16, "vit_l_32": 32}
# The smallest image side, in pixels, with which a forward pass in training mode works, by families of models.
SMALLEST_SIDES: dict[str, int] = {
    "alexnet": 63, "convnext": 32, "densenet": 29, "googlenet": 15, "inception": 75, "squeezenet1_0": 21,
    "squeezenet1_1": 17, "vgg": 32, **SIZE_MULTIPLES,
}  # fmt: skip
ANY_SIDE = 8  # pixels: least side for models that take any size; smaller images show nothing

# torchvision's image classifiers, each with its published weights by name, the best first: the file, whose name ends
# with the first digits of its SHA-256; the side in pixels of the model's square; and the shorter side of the image from
# whose middle the square is cut.
TORCHVISION_WEIGHTS: dict[str, dict[str, tuple[str, int, int]]] = json.loads(
    Path(__file__).with_name("torchvision_weights.json").read_bytes()
)
# torchvision's image classifiers, each with its smallest image side.
TORCHVISION_MODELS: dict[str, int] = {
    model: next((side for family, side in SMALLEST_SIDES.items() if model.startswith(family)), ANY_SIDE)
    for model in TORCHVISION_WEIGHTS
}
MODELS: tuple[str, ...] = (*SMALL_MODELS, *TORCHVISION_MODELS)
MODELS_PAGE = "https://docs.pytorch.org/vision/stable/models.html"  # lists torchvision's


def encoded_kind(dataset: str) -> str:
    """Return "shards", "stream" or "image_folder" for a data set's name that begins so, with an address; else ""."""
    kind, _, address = dataset.partition(":")
    return kind if kind in ENCODED_KINDS and address else ""


def check_image_size(model: str, height: int, width: int) -> None:
    """Raise UserError, with a size that fits, if a built-in model cannot take images of this size in pixels."""
    smallest = {**SMALL_MODELS, **TORCHVISION_MODELS}.get(model, 1)
    multiple = SIZE_MULTIPLES.get(model, 1)
    if min(height, width) < smallest or height % multiple or width % multiple:
        rule = f"sides must be at least {smallest}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
    elif model.startswith("vit_") and height != width:
        rule = "they must be square"
    else:
        return
    fits = -(-max(smallest, height, width) // multiple) * multiple
    raise UserError(f"model {model!r} cannot take {height}x{width} images: {rule}; set image_size={fits}")
