"""Writes models as ONNX by torch's exporters. A model of images is exported with preprocessing."""

import dataclasses
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.core.errors import install_hint
from flyte_ddp.core.models import saving
from flyte_ddp.core.models.inputs import compute_normalisation
from flyte_ddp.core.models.sidecar import MIDDLE, ImageInput, Sidecar
from flyte_ddp.core.samples.leaves import call_with_leaves, restore_leaves
from flyte_ddp.objectives.segmentation import extract_mask_logits

ONNX = "model.onnx"
LARGEST = 2**15  # weights of pixels are whole numbers below this


class NotExportedError(Exception):
    """A model cannot be exported: the extra is not installed, or the exporter cannot follow the model's code."""


def write_onnx(
    module: nn.Module, example: Mapping[str, Tensor], sizes: Mapping[str, Mapping[int, Any]], folder: Path
) -> Mapping[str, Tensor]:
    """Write ``model.onnx`` into a folder, and return the module's outputs for the example.

    Silences loggers, warnings and stderr of the process meanwhile. Exceptions of the exporters pass through.

    Args:
        module: A module in evaluation mode, which maps a dict of inputs to a dict of outputs.
        example: The inputs by name. Sizes that may differ must be at least 2, because exporters treat 0 and 1 as
            constants.
        sizes: By the input's name, a ``torch.export.Dim`` for each dimension whose size may differ from the example's.
        folder: An existing folder.

    Raises:
        NotExportedError: The extra ``export`` is not installed. The module has no outputs, or an output has an input's
            name. This torch exports the module's LSTM or GRU layers only for one fixed length.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise NotExportedError(f"{error.name} is not installed: {install_hint('export')}") from error
    with silence_torch(), torch.no_grad(), export_recurrent_layers_as_loops(module):
        outputs: Mapping[str, Tensor] = module(example)
        if not outputs:
            raise NotExportedError("its outputs contain no named float tensor")
        if both := example.keys() & outputs.keys():
            raise NotExportedError(f"an input and an output are both called {min(both)!r}; rename the output")
        try:
            program = torch.export.export(module, (example,), dynamic_shapes=(sizes,))
        except Exception:  # code such as len(images), which turns a size into a number, needs strict=True
            program = torch.export.export(module, (example,), dynamic_shapes=(sizes,), strict=True)
        written: Any = torch.onnx.export(
            program, (), dynamo=True, input_names=[*example], output_names=[*outputs], verbose=False
        )
        written.save(folder / ONNX, external_data=False)
    return outputs


@contextmanager
def export_recurrent_layers_as_loops(module: nn.Module) -> Iterator[None]:
    """Make torch export LSTM and GRU layers as loops during the block. The loops run for any length.

    Uses private functions of torch. If this torch lacks the functions, does nothing for modules without these layers.

    Raises:
        NotExportedError: This torch lacks the functions, and ``module`` has such a layer.
    """
    try:
        from torch.export import _patches

        lstm, gru = _patches.register_lstm_while_loop_decomposition, _patches.register_gru_while_loop_decomposition
    except (ImportError, AttributeError) as error:
        if any(isinstance(layer, (nn.LSTM, nn.GRU)) for layer in module.modules()):
            why = f"torch {torch.__version__} exports LSTM and GRU for one length only ({error}); use an older torch"
            raise NotExportedError(why) from error
        yield
        return
    with lstm(), gru():
        yield


@contextmanager
def silence_torch() -> Iterator[None]:
    """Silence torch's loggers, Python warnings and sys.stderr during the block, in all threads of the process."""
    import torch._dynamo  # noqa: F401  # creates torch's loggers

    # Exporters try several ways, and log a traceback for each failure.
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    nothing = logging.Filter("none of torch's loggers")  # passes only records of a logger of that name
    for handler in handlers:
        handler.addFilter(nothing)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some graphs are printed
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(nothing)


class ServedImages(nn.Module):
    """A module that maps ``images``, uint8 [N, H, W, C], grey or RGB, to ``logits``, float32 [N, ...].

    Crops and resizes as evaluations do. Resizing is a product with a matrix of weights, because the resizing operations
    of exporters do not give torch's pixels.
    """

    def __init__(self, model: nn.Module, sidecar: Sidecar) -> None:
        super().__init__()
        assert isinstance(sidecar.input, ImageInput)
        spec = saving.make_image_spec(sidecar.input)
        self.model, self.channels, self.height, self.width = model, spec.channels, spec.height, spec.width
        self.middle, self.share = sidecar.input.crop == MIDDLE, spec.crop_share
        scale, shift = compute_normalisation(spec, torch.device("cpu"), torch.float32)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("shift", shift.clone())

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Crop, resize and normalise uint8 ``images`` as evaluations do, and return the model's float32 ``logits``."""
        images = inputs["images"]
        if self.middle:
            height, width = images.shape[1], images.shape[2]
            side = compute_middle_square_side(torch.sym_min(height, width), self.share)
            images = images.narrow(1, (height - side) // 2, side).narrow(2, (width - side) // 2, side)
        pixels = resize_width(images.float(), self.width, rounded=self.middle)
        pixels = resize_width(pixels.transpose(1, 2), self.height, rounded=self.middle).transpose(1, 2)
        scale, shift = self.get_buffer("scale"), self.get_buffer("shift")
        normal = (pixels * scale + shift).permute(0, 3, 1, 2).contiguous()  # as in training: models may use view()
        return {"logits": extract_mask_logits(self.model(normal)).float()}


class ServedLeaves(nn.Module):
    """A module that calls a model with inputs by name, and returns the outputs by name as float32."""

    def __init__(self, model: nn.Module, form: str) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return name_output_tensors(call_with_leaves(self.model, restore_leaves(self.form, inputs)))


def name_output_tensors(outputs: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors among a model's outputs by name, as float32.

    A single tensor is ``outputs``, and the tensors of a tuple are ``outputs_0``, ``outputs_1``, ... The tensors of a
    dict or a dataclass keep their names. Of another object, only ``logits`` is returned. If the outputs have no such
    tensors, returns {}.
    """
    if isinstance(outputs, Tensor):
        named: Mapping[Any, Any] = {"outputs": outputs}
    elif isinstance(outputs, Mapping):
        named = outputs
    elif isinstance(outputs, (tuple, list)):
        named = {f"outputs_{place}": values for place, values in enumerate(outputs)}
    elif dataclasses.is_dataclass(outputs):
        named = {each.name: getattr(outputs, each.name) for each in dataclasses.fields(outputs)}
    else:
        named = {"logits": getattr(outputs, "logits", None)}
    return {
        str(name): values.float()
        for name, values in named.items()
        if isinstance(values, Tensor) and values.is_floating_point()
    }


def compute_middle_square_side(shorter: Any, share: float) -> Any:
    """Return the side of the middle square: ``share`` of the shorter side, rounded as by ``round``, at least 1.

    ``shorter`` is the length of the shorter side, an int or torch's SymInt. ``share`` is at most 1, and a quotient of
    whole numbers below 1,000. Exporters can follow all operations for an unknown size.
    """
    part, whole = Fraction(share).limit_denominator(999).as_integer_ratio()
    doubled = 2 * part * shorter + whole  # divided by 2 * whole: the side, halves rounded up
    # 1 if a half was rounded up to an odd number (``doubled`` is then an odd multiple of 2 * whole), else 0.
    is_odd_half = (doubled - 2 * whole) // (4 * whole) - (doubled - 2 * whole - 1) // (4 * whole)
    return torch.sym_max(doubled // (2 * whole) - is_odd_half, 1)


def resize_width(pixels: Tensor, size: int, *, rounded: bool) -> Tensor:
    """Resize images float32 [N, H, W, C] to [N, H, size, C]. Values are from 0 to 255.

    If ``rounded`` is True, the result is whole numbers, rounded as torch does for uint8.
    """
    weights = make_resize_matrix(pixels.shape[2], size)
    if not rounded:
        return torch.matmul(weights.float(), pixels)
    # torch's arithmetic for uint8 (upsample_avx_bilinear_bicubic_uint8): weights are whole numbers below 2 ** 15,
    # of one unit for all. Sums of 255 times the weights are below 2 ** 24, and therefore exact in float32.
    powers = 2.0 ** torch.arange(1, 23, dtype=torch.float64)
    unit = 2.0 ** ((weights.max() * powers + 0.5).floor() < LARGEST).sum().double()
    sums = torch.matmul((weights * unit + 0.5).floor().float(), pixels)
    return (sums / unit.float() + 0.5).floor().clamp(0, 255)


def make_resize_matrix(inputs: Any, outputs: int) -> Tensor:
    """Return the float64 matrix [outputs, inputs] that resizes a row of ``inputs`` pixels to ``outputs`` pixels.

    The weights are of bilinear interpolation with antialiasing, as in torch and Pillow. The weights of a row form a
    triangle, as wide as two pixels of the coarser row. ``inputs`` is an int, or torch's SymInt.
    """
    scale = torch.full((), inputs, dtype=torch.float64) / outputs
    centers = (torch.arange(outputs, dtype=torch.float64) + 0.5) * scale
    places = torch.arange(inputs, dtype=torch.float64) + 0.5
    weights = (1 - ((places[None] - centers[:, None]) / scale.clamp(min=1)).abs()).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)
