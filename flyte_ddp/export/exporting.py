"""Exporting a model as ONNX, and comparing it with torch on all test samples."""

from pathlib import Path
from tempfile import TemporaryDirectory

from flyte_ddp.datasets.prepared import ItemSet, PreparedSet, has_pictures
from flyte_ddp.errors import UnreachableError
from flyte_ddp.export.comparison import Comparison
from flyte_ddp.export.exporting_images import export_images_model
from flyte_ddp.export.exporting_leaves import export_leaves_model
from flyte_ddp.export.graphs import ONNX, NotExportedError
from flyte_ddp.predict.prediction_batches import SavedModel


def export_model(model: SavedModel, split: PreparedSet, folder: Path) -> Comparison:
    """Export a model, compare the ONNX with torch on all test samples, and return the comparison.

    Writes ``model.onnx`` into an existing folder if the comparison passes. Raises UnreachableError if the storage of
    the test split does not answer; NotExportedError if the extra ``export`` is not installed, or after any other
    exception.
    """
    with TemporaryDirectory(dir=folder) as name:  # so that the file appears only if the comparison passes
        made = Path(name)
        try:
            if isinstance(split, ItemSet) and not has_pictures(split):
                found = export_leaves_model(model, split, made)
            else:
                found = export_images_model(model, split, made)
            if found.passed:
                (made / ONNX).rename(folder / ONNX)
        except (NotExportedError, UnreachableError):
            raise
        except Exception as error:  # a full disk, or any error of the user's model
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
            line = next((line for line in lines if "to be a constant" in line), lines[0])  # of a size that must not be
            raise NotExportedError(f"{type(cause).__name__}: {line[:200]}") from error
    return found
