"""The names that configuration may use, kept apart from what they stand for.

Checking a name must not cost an import of torch and torchvision (over 2 s), so the names are written down here; tests
compare them with what is really there.
"""

from __future__ import annotations

from flyte_ddp.errors import UserError

# Each data set with the side of its square images, in pixels.
DATASETS: dict[str, int] = {"digits": 8, "mnist": 28, "fashion_mnist": 28, "cifar10": 32}

# The other forms that a data set's name may have.
DATASET_FORMS = ("shards:ADDRESS", "stream:ADDRESS", "image_folder:ADDRESS", "package.module:callable")
ENCODED_KINDS = ("shards", "stream", "image_folder")  # of encoded images, which stay where they are
ENCODED_SIDE = 224  # of the squares that they become, in pixels, if nothing else is asked for
# How the names of image files end, and those of images in shards.
IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff")

# The two small CNNs with the smallest image side that they take.
SMALL_MODELS: dict[str, int] = {"small_cnn": 8, "tutorial": 16}

# torchvision's image classifiers: the smallest image side, in pixels, with which a forward pass in training mode works.
# Models that take any size are given 8, below which nothing is left to see.
TORCHVISION_MODELS: dict[str, int] = {
    "alexnet": 63,
    "convnext_base": 32,
    "convnext_large": 32,
    "convnext_small": 32,
    "convnext_tiny": 32,
    "densenet121": 29,
    "densenet161": 29,
    "densenet169": 29,
    "densenet201": 29,
    "efficientnet_b0": 8,
    "efficientnet_b1": 8,
    "efficientnet_b2": 8,
    "efficientnet_b3": 8,
    "efficientnet_b4": 8,
    "efficientnet_b5": 8,
    "efficientnet_b6": 8,
    "efficientnet_b7": 8,
    "efficientnet_v2_l": 8,
    "efficientnet_v2_m": 8,
    "efficientnet_v2_s": 8,
    "googlenet": 15,
    "inception_v3": 75,
    "maxvit_t": 224,
    "mnasnet0_5": 8,
    "mnasnet0_75": 8,
    "mnasnet1_0": 8,
    "mnasnet1_3": 8,
    "mobilenet_v2": 8,
    "mobilenet_v3_large": 8,
    "mobilenet_v3_small": 8,
    "regnet_x_16gf": 8,
    "regnet_x_1_6gf": 8,
    "regnet_x_32gf": 8,
    "regnet_x_3_2gf": 8,
    "regnet_x_400mf": 8,
    "regnet_x_800mf": 8,
    "regnet_x_8gf": 8,
    "regnet_y_128gf": 8,
    "regnet_y_16gf": 8,
    "regnet_y_1_6gf": 8,
    "regnet_y_32gf": 8,
    "regnet_y_3_2gf": 8,
    "regnet_y_400mf": 8,
    "regnet_y_800mf": 8,
    "regnet_y_8gf": 8,
    "resnet101": 8,
    "resnet152": 8,
    "resnet18": 8,
    "resnet34": 8,
    "resnet50": 8,
    "resnext101_32x8d": 8,
    "resnext101_64x4d": 8,
    "resnext50_32x4d": 8,
    "shufflenet_v2_x0_5": 8,
    "shufflenet_v2_x1_0": 8,
    "shufflenet_v2_x1_5": 8,
    "shufflenet_v2_x2_0": 8,
    "squeezenet1_0": 21,
    "squeezenet1_1": 17,
    "swin_b": 8,
    "swin_s": 8,
    "swin_t": 8,
    "swin_v2_b": 8,
    "swin_v2_s": 8,
    "swin_v2_t": 8,
    "vgg11": 32,
    "vgg11_bn": 32,
    "vgg13": 32,
    "vgg13_bn": 32,
    "vgg16": 32,
    "vgg16_bn": 32,
    "vgg19": 32,
    "vgg19_bn": 32,
    "vit_b_16": 16,
    "vit_b_32": 32,
    "vit_h_14": 14,
    "vit_l_16": 16,
    "vit_l_32": 32,
    "wide_resnet101_2": 8,
    "wide_resnet50_2": 8,
}

# Side lengths that must divide the image side: transformers that cut images into patches or windows of a fixed size.
SIZE_MULTIPLES: dict[str, int] = {
    "maxvit_t": 224,
    "vit_b_16": 16,
    "vit_b_32": 32,
    "vit_h_14": 14,
    "vit_l_16": 16,
    "vit_l_32": 32,
}

# Prefixes of torchvision's other model families, with the reason why they cannot be trained here.
UNSUPPORTED_PREFIXES: dict[str, str] = {
    "quantized_": "quantised models are for inference only; train the model of the same name without 'quantized_'",
    "deeplabv3_": "it segments images and this package trains classifiers",
    "fcn_": "it segments images and this package trains classifiers",
    "lraspp_": "it segments images and this package trains classifiers",
    "fasterrcnn_": "it detects objects and this package trains classifiers",
    "fcos_": "it detects objects and this package trains classifiers",
    "keypointrcnn_": "it detects key points and this package trains classifiers",
    "maskrcnn_": "it detects objects and this package trains classifiers",
    "retinanet_": "it detects objects and this package trains classifiers",
    "ssd": "it detects objects and this package trains classifiers",
    "raft_": "it estimates optical flow and this package trains classifiers",
    "mc3_": "it takes video and this package trains on images",
    "mvit_": "it takes video and this package trains on images",
    "r2plus1d_": "it takes video and this package trains on images",
    "r3d_": "it takes video and this package trains on images",
    "s3d": "it takes video and this package trains on images",
    "swin3d_": "it takes video and this package trains on images",
}

MODELS: tuple[str, ...] = (*SMALL_MODELS, *TORCHVISION_MODELS)


def encoded_kind(dataset: str) -> str:
    """Which kind of encoded images it names, one of ``ENCODED_KINDS``; empty for another data set."""
    kind, _, address = dataset.partition(":")
    return kind if kind in ENCODED_KINDS and address else ""


def check_image_size(model: str, height: int, width: int) -> None:
    """Refuses images that the model cannot take; of the user's own models nothing is known.

    Raises:
        UserError: with the sizes that it can take.
    """
    smallest = {**SMALL_MODELS, **TORCHVISION_MODELS}.get(model, 1)
    multiple = SIZE_MULTIPLES.get(model, 1)
    rule = f"sides must be at least {smallest}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
    fits = -(-max(smallest, height, width) // multiple) * multiple
    if min(height, width) < smallest or height % multiple or width % multiple:
        raise UserError(f"model {model!r} cannot take {height}x{width} images: {rule}; set image_size={fits}")
    if model.startswith("vit_") and height != width:
        raise UserError(
            f"model {model!r} cannot take {height}x{width} images: they must be square; set image_size={fits}"
        )


def why_unsupported(model: str) -> str | None:
    """The reason why a model of torchvision cannot be used, or None for a name that is not known to be such a one."""
    return next((reason for prefix, reason in UNSUPPORTED_PREFIXES.items() if model.startswith(prefix)), None)
