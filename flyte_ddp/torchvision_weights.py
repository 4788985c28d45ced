"""torchvision's pretrained weights by name: their files, and the input that they were trained on."""

from dataclasses import dataclass

from flyte_ddp import catalog
from flyte_ddp.errors import UserError, unknown_name_error

PREFIX = "torchvision:"  # of init_from, before the name of the weights
ADDRESS = "https://download.pytorch.org/models"  # has all files
CLASSES = 1000  # of ImageNet, for which all weights were trained
DEFAULT = "DEFAULT"  # torchvision's name for the best weights of a model: the first here
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and std of values in 0..1
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
# Mean and std of weights, by the start of their file's name, where they are not ImageNet's. torchvision gives Google's
# two models images that are normalised by ImageNet's, and lets the models themselves change these to the halves.
OTHERS = {"efficientnet_v2_l": HALF, "googlenet": HALF, "inception_v3": HALF}
OTHERS |= {"vgg16_features": ((0.48235, 0.45882, 0.40784), (1 / 255,) * 3)}


@dataclass(frozen=True)
class PretrainedWeights:
    """One of torchvision's files of weights, and the images that it was trained on: RGB, ``side`` x ``side`` pixels.

    ``mean`` and ``std`` are of values in 0..1. ``crop_share`` is the share of an image's shorter side that is seen.
    """

    file: str
    side: int
    crop_share: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def digest_start(self) -> str:
        """The first 8 digits or more of the file's SHA-256 (hex), which its name ends with."""
        return self.file.removesuffix(".pth").rpartition("-")[2]


def choose_side(image_size: int, weights: PretrainedWeights | None) -> int:
    """Return the side of a model's images in pixels: ``image_size``, or if 0 that of the weights, or 0."""
    return image_size or (weights.side if weights else 0)


def find_weights(model: str, init_from: str) -> PretrainedWeights | None:
    """Return the weights that ``torchvision:NAME`` stands for with this model; None for any other ``init_from``."""
    if not init_from.startswith(PREFIX):
        return None
    if model not in catalog.TORCHVISION_MODELS:
        raise UserError(
            f"init_from={init_from!r}: goes with a model of torchvision's, not with {model!r}; "
            "set model to one of these, such as resnet18, or init_from to a file of weights"
        )
    known = catalog.TORCHVISION_WEIGHTS[model]
    named = {DEFAULT: next(iter(known.values())), **known}
    name = init_from.removeprefix(PREFIX)
    if name not in named:
        raise unknown_name_error(f"init_from for {model}:", init_from, [f"{PREFIX}{each}" for each in named])
    file, side, shorter_side = named[name]
    mean, std = next((values for start, values in OTHERS.items() if file.startswith(start)), IMAGENET)
    return PretrainedWeights(file, side, side / shorter_side, mean, std)
