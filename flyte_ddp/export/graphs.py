"""Writing a module's graph as ONNX, by torch's exporters."""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.errors import install_hint

ONNX = "model.onnx"


class NotExportedError(Exception):
    """There is no ONNX of this model: the extra is not installed, or the exporter cannot follow the model's code."""


def write_onnx(
    module: nn.Module, example: Mapping[str, Tensor], sizes: Mapping[str, Mapping[int, Any]], folder: Path
) -> Mapping[str, Tensor]:
    """Write ``model.onnx`` into a folder, and return the module's outputs for the example.

    ``module``, in evaluation mode, takes and returns tensors by name. ``sizes`` are the ``torch.export.Dim`` of each
    dimension of other sizes than the example's. Exporters take sizes of 0 and 1 for constants, and their exceptions go
    through. Raises NotExportedError without the extra ``export``, and for a module without outputs. Silences loggers,
    warnings and stderr of the process meanwhile.
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
            raise NotExportedError("its outputs hold no tensor of floats by name")
        try:
            program = torch.export.export(module, (example,), dynamic_shapes=(sizes,))
        except Exception:  # of code that makes a number of a size, such as len(images), which the other way understands
            program = torch.export.export(module, (example,), dynamic_shapes=(sizes,), strict=True)
        written: Any = torch.onnx.export(
            program, (), dynamo=True, input_names=[*example], output_names=[*outputs], verbose=False
        )
        written.save(folder / ONNX, external_data=False)
    return outputs


@contextmanager
def export_recurrent_layers_as_loops(module: nn.Module) -> Iterator[None]:
    """Have torch export LSTM and GRU layers for any length in the block: without its private patches for one only."""
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
    """Silence torch's loggers, Python warnings and sys.stderr of the whole process in the block."""
    import torch._dynamo  # noqa: F401  # makes its loggers

    # Exporters try several ways, and log a traceback for each failure.
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    handlers = [handler for name in names for handler in logging.getLogger(name).handlers]
    nothing = logging.Filter("none of torch's loggers")  # lets through what a logger of that name logs
    for handler in handlers:
        handler.addFilter(nothing)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # some graphs are printed
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(nothing)
