"""Inputs of models (images of one size, or any leaves), and the conversion of batches into inputs."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from flyte_ddp.core.errors import UserError
from flyte_ddp.core.models.sidecar import EVALUATION_SHARE, MIDDLE, ImageInput, Leaf, LeavesInput
from flyte_ddp.core.samples.leaves import Leaves, call_with_leaves, describe_form, name_leaves, restore_leaves
from flyte_ddp.core.samples.pictures import BACKGROUND


@dataclass(frozen=True)
class InputSpec:
    """Images as a model's input: channels, height and width, and each channel's mean and std of values in 0..1."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_share: float = EVALUATION_SHARE  # side of the middle square for evaluations / shorter side of an encoded image
    pictures: ClassVar[bool] = True
    form: ClassVar[str] = "images"
    leaves: ClassVar[tuple[tuple[str, "LeafSpec"], ...]] = ()

    def shapes(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def accepts(self, found: "ModelInput") -> bool:
        """Return whether images of the spec ``found`` fit this model input. Sizes may differ. Grey fits colour."""
        return isinstance(found, InputSpec) and found.channels in (1, self.channels)

    def describe(self) -> str:
        return f"images of {self.channels} channels"

    def can_be_mixed(self) -> bool:
        return True

    def to_sidecar_input(self, crop: str = "") -> ImageInput:
        """Return the entry ``input`` of ``model.json``: the model's input, and how other programs prepare an image.

        ``crop`` is "middle" if the model was evaluated on the middle square of images, else "".
        """
        middle = crop == MIDDLE
        return ImageInput(
            channels=self.channels,
            height=self.height,
            width=self.width,
            mean=[*self.mean],
            std=[*self.std],
            crop=crop,
            background=[*BACKGROUND],
            mode={1: "L", 3: "RGB"}.get(self.channels, ""),
            crop_share=self.crop_share if middle else None,
            resize_dtype="uint8" if middle else "float32",
        )


class LeafSpec(NamedTuple):
    """One leaf of a sample's inputs."""

    shape: tuple[int | None, ...]  # without the samples' dimension, and None where lengths differ between samples
    dtype: str  # "float" (of the run's type), "int64", "bool", or "other" if not a tensor


@dataclass(frozen=True)
class LeavesSpec:
    """A model's inputs that are no images: the form (leaf, tuple or dict), and each leaf by name."""

    form: str
    leaves: tuple[tuple[str, LeafSpec], ...]
    pictures: ClassVar[bool] = False

    def shapes(self) -> Leaves:
        """Return the shape of the leaf of a sample, or a tuple or dict with the shapes of several leaves."""
        return restore_leaves(self.form, {name: leaf.shape for name, leaf in self.leaves})

    def accepts(self, found: "ModelInput") -> bool:
        """Return whether leaves of the spec ``found`` fit this model input.

        Names, order, types and dimensions must be equal. A size of None fits all sizes.
        """
        if self.form != found.form or len(self.leaves) != len(found.leaves):
            return False
        return all(
            (name, own.dtype, len(own.shape)) == (other_name, other.dtype, len(other.shape))
            and all(a == b or None in (a, b) for a, b in zip(own.shape, other.shape, strict=True))
            for (name, own), (other_name, other) in zip(self.leaves, found.leaves, strict=True)
        )

    def can_be_mixed(self) -> bool:
        """Return whether all leaves are floats of one shape."""
        return all(leaf.dtype == "float" and None not in leaf.shape for _, leaf in self.leaves)

    def reorder_leaves_like(self, other: "ModelInput") -> "LeavesSpec":
        """Return this spec with its leaves in the order of ``other``. If the names differ, returns this spec."""
        own, names = dict(self.leaves), [name for name, _ in other.leaves]
        return LeavesSpec(self.form, tuple((name, own[name]) for name in names)) if own.keys() == {*names} else self

    def describe(self) -> str:
        return self.to_sidecar_input().describe()

    def to_sidecar_input(self, crop: str = "") -> LeavesInput:  # noqa: ARG002  # only images are cropped
        return LeavesInput(self.form, {name: Leaf([*leaf.shape], leaf.dtype) for name, leaf in self.leaves})


ModelInput: TypeAlias = InputSpec | LeavesSpec


def prepare_inputs(
    inputs: Leaves,
    spec: ModelInput,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Leaves:
    """Return a batch's inputs in the form that the model accepts.

    Images (uint8 [N, H, W, C]) are resized and normalised to [N, C, height, width], in ``dtype`` and
    ``memory_format``. If the model needs three channels, grey images become RGB. In other inputs,
    floats are converted to ``dtype``.
    """
    if isinstance(spec, InputSpec):
        return prepare_images(inputs, spec, dtype, memory_format)

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return convert(inputs) if isinstance(inputs, Tensor) else tree_map(convert, inputs)  # much faster for one tensor


def prepare_images(images: Tensor, spec: InputSpec, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
    """Resize and normalise images (uint8 [N, H, W, C]) into a new tensor [N, channels, height, width].

    If the model needs three channels, grey images become RGB. The tensor is on the device of ``images``.
    """
    scale, shift = compute_normalisation(spec, images.device, dtype)
    batch = images.to(dtype, memory_format=torch.contiguous_format)
    if batch.shape[1:] == (spec.height, spec.width, spec.channels):
        rows = batch.flatten(2)  # one vector operation for each row of pixels is faster than a loop over three channels
        torch.addcmul(shift.repeat(spec.width), rows, scale.repeat(spec.width), out=rows)
        batch = batch.permute(0, 3, 1, 2)
    else:
        batch = batch.permute(0, 3, 1, 2)
        if batch.shape[2:] != (spec.height, spec.width):
            batch = functional.interpolate(batch, (spec.height, spec.width), mode="bilinear", antialias=True)
        # Broadcasting a grey image against factors of three channels makes it RGB.
        batch = torch.addcmul(shift[:, None, None], batch, scale[:, None, None])
    batch = batch.contiguous(memory_format=memory_format)
    if memory_format == torch.contiguous_format:
        # A tensor of one channel is contiguous in both memory orders. By its strides torch would treat it, and all
        # later results, as channels-last, and `x.view(len(x), -1)` in a model would fail.
        batch = batch.flatten(1).view(batch.shape)
    return batch


@functools.lru_cache(maxsize=8)
def compute_normalisation(spec: InputSpec, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale and shift of each channel, for normalising pixels of 0..255 by ``value * scale + shift``. Cached."""
    mean, std = (torch.tensor(values, dtype=torch.float64, device=device) for values in (spec.mean, spec.std))
    return (1.0 / (std * 255.0)).to(dtype), (-mean / std).to(dtype)


@contextmanager
def translate_input_errors(name: str, model: nn.Module, inputs: Leaves) -> Iterator[None]:
    """Turn two errors of a model call in the block into UserErrors: unknown tokens, and inputs that do not fit.

    An embedding on a CPU raises IndexError for an unknown token. A call raises TypeError if ``forward`` does not accept
    the inputs. Other errors are raised unchanged.

    Args:
        name: The name of the model in errors.
        model: The model.
        inputs: The inputs that the model is called with.
    """
    try:
        yield
    except IndexError as error:  # of an embedding on a CPU (on a GPU, the error ends the process)
        if "out of range in self" not in str(error):
            raise
        whole = {key: leaf for key, leaf in name_leaves(inputs).items() if getattr(leaf, "dtype", None) == torch.int64}
        ranges = ", ".join(f"{key} {leaf.min()}..{leaf.max()}".strip() for key, leaf in whole.items())
        raise UserError(
            f"model {name!r}: an input is out of range for an embedding (ranges of the inputs: {ranges}); give the "
            "embedding more rows, or correct the inputs"
        ) from error
    except TypeError as error:
        try:
            call_with_leaves(inspect.signature(model.forward).bind, inputs)
        except TypeError as mismatch:
            what = f"forward does not accept the inputs, {describe_form(inputs)}: {mismatch}"
            raise UserError(f"model {name!r}: {what}; accept all inputs (collate='padded' adds the mask)") from error
        raise
