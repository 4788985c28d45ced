"""Models by name: two small CNNs, torchvision's classifiers, and user-defined models."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flyte_ddp import catalog
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.inputs import InputSpec, ModelInput
from flyte_ddp.core.user_code.callables import check_options_are_accepted, load_callable

Value = TypeVar("Value")


def choose_input_spec(model: str, images: InputSpec, size: int, weights: catalog.PretrainedWeights | None) -> InputSpec:
    """Return the size, channels and normalisation of a model's input images.

    ``images`` describes the images of the data set. If ``size`` is not 0, images are resized to squares of this side.
    Otherwise pretrained ``weights`` decide the side, and without weights the size stays unchanged. Models of
    torchvision get three channels. Pretrained weights also decide mean, std and crop.

    Raises:
        UserError: The model does not accept the size or the number of channels.
    """
    size = catalog.choose_image_side(size, weights)
    spec = replace(images, height=size or images.height, width=size or images.width)
    catalog.check_image_size(model, spec.height, spec.width)
    if model not in catalog.TORCHVISION_MODELS:
        return spec
    if spec.channels not in (1, 3):
        raise UserError(
            f"model {model!r} does not accept images with {spec.channels} channels: torchvision's models accept 1 or "
            "3; use small_cnn or a user-defined model"
        )
    if weights:
        return replace(spec, channels=3, mean=weights.mean, std=weights.std, crop_share=weights.crop_share)
    return spec if spec.channels == 3 else replace(spec, channels=3, mean=spec.mean * 3, std=spec.std * 3)


def build_model(
    name: str, num_classes: int, spec: ModelInput, options: Mapping[str, Any] = MappingProxyType({})
) -> nn.Module:
    """Return a model with new weights, drawn from the global random generators of torch, Python and NumPy.

    A built-in model maps float32 [N, channels, height, width] to outputs [N, num_classes]. A
    ``package.module:callable`` is imported, and called with ``options``. If the callable has the parameters
    ``num_classes`` and ``input_shape``, or accepts any keyword, these two are passed, too. Exceptions of the callable
    pass through.

    ``input_shape`` is ``spec.shapes()``, the shape of one sample: (channels, height, width) for images, else the shape
    of the tensor. For several tensors, ``input_shape`` is a tuple or dict of shapes. A size that differs between
    samples is None.

    Raises:
        UserError: The callable cannot be loaded, is a module instance, or returns no module. Also if the options do not
            fit.
    """
    if ":" in name:
        own = load_callable(name)
        if isinstance(own, nn.Module):
            raise UserError(
                f"model {name!r} is a model instance; name a function that returns a new model, or the model's class"
            )
        given = select_arguments(own, {"num_classes": num_classes, "input_shape": spec.shapes()})
        check_options_are_accepted(f"model {name!r}", own, options, **given)
        model = own(**given, **options)
        if not isinstance(model, nn.Module):
            raise UserError(f"model {name!r} returned a {type(model).__name__}: must return a torch.nn.Module")
        return model
    assert isinstance(spec, InputSpec)  # PreparedSet.check_settings rejects others
    try:
        if name in SMALL_MODELS:
            return SMALL_MODELS[name](num_classes, spec, **options)
        return build_torchvision_model(name, num_classes, spec, options)
    except TypeError as error:
        if not options:
            raise
        raise UserError(f"options of model {name!r}: {error}; correct the options") from None


def build_torchvision_model(name: str, num_classes: int, spec: InputSpec, options: Mapping[str, Any]) -> nn.Module:
    """Return a torchvision classifier with new weights. ``options`` are further arguments of its constructor.

    An option replaces an argument that this library sets.

    Raises:
        TypeError: An option is unknown. Other exceptions of torchvision's constructors pass through.
    """
    from torchvision import models

    special: Mapping[str, object] = {}
    if name in ("googlenet", "inception_v3"):
        special = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        special = {"image_size": spec.height}
    elif name == "maxvit_t":
        special = {"input_size": (spec.height, spec.width)}
    built: nn.Module = models.get_model(name, **{"weights": None, "num_classes": num_classes, **special, **options})
    return built


class Tutorial(nn.Module):
    """The two-convolution network of Flyte's MNIST tutorial (431,080 parameters on 1x28x28 images of 10 classes)."""

    def __init__(self, num_classes: int, spec: InputSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(spec.channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        height, width = (((side - 4) // 2 - 4) // 2 for side in (spec.height, spec.width))
        self.fc1 = nn.Linear(50 * height * width, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [n, classes] of normalised images [n, channels, height, width]."""
        if images.device.type != "cpu":
            x = torch.max_pool2d(self.conv1(images), 2)
        else:
            # The full output of this convolution is most of the step's memory traffic. A CPU computes 32 images at a
            # time, so they are pooled while in the cache. Pooling is in fp32, because 20 channels are too
            # few for bf16 vector instructions.
            parts = torch.split(images, 32)
            x = torch.cat([torch.max_pool2d(self.conv1(part).float(), 2) for part in parts])
        # The tutorial has relu before pooling. After pooling, the result is equal for a quarter of the work.
        x = torch.relu(x)
        x = torch.relu(torch.max_pool2d(self.conv2(x), 2))
        x = torch.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


class SmallCNN(nn.Module):
    """A CNN with two convolutions, the first of stride 2, and a hidden layer.

    The model has 207,034 parameters on 1x28x28 images of 10 classes. No layer writes at full resolution. On a CPU, a
    step is about twice as fast as with the tutorial's network.
    """

    def __init__(self, num_classes: int, spec: InputSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(spec.channels, 16, 4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        height, width = (side // 2 // 2 for side in (spec.height, spec.width))
        self.fc1 = nn.Linear(32 * height * width, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [n, classes] of normalised images [n, channels, height, width]."""
        x = torch.relu(self.conv1(images))
        x = torch.relu(torch.max_pool2d(self.conv2(x), 2))
        x = torch.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


SMALL_MODELS: dict[str, Callable[..., nn.Module]] = {"small_cnn": SmallCNN, "tutorial": Tutorial}


def select_arguments(function: Callable[..., Any], arguments: Mapping[str, Value]) -> dict[str, Value]:
    """Return the arguments that a callable has parameters for, or all arguments if any keyword is accepted."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
