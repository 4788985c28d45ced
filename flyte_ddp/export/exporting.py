"""Exports a model as ONNX with named inputs and outputs, and compares the ONNX with torch on all test samples."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim

from flyte_ddp.core.errors import UnreachableError
from flyte_ddp.core.loading.padding import MASK, widen_type
from flyte_ddp.core.machine.resources import count_cores
from flyte_ddp.core.models.inputs import LeavesSpec
from flyte_ddp.core.samples.leaves import Leaves, get_leaves_form
from flyte_ddp.datasets.collate import PADDED
from flyte_ddp.datasets.prepared_set import Opening, PreparedSet
from flyte_ddp.export.graphs import ONNX, NotExportedError, ServedImages, ServedLeaves, write_onnx
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.models import artifacts
from flyte_ddp.objectives.segmentation import extract_mask_logits
from flyte_ddp.predict.prediction_batches import SavedModel, read_test_batches

BATCH_SIZES = (1, 7, 64)  # several, because a graph may contain the size of a batch as a constant
EXAMPLE = 7  # samples of the batch that exporters trace
MOST_BYTES = 2**28  # of a batch that repeats an image
BATCH_BYTES = 2**30  # of the outputs of more than EXAMPLE samples: a text may have 50,000 for each token
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}  # of the outputs' range; a GPU's convolutions are in TF32, of 10 bits
ROUNDING = 1e-5  # of the largest number of an output: float32 cannot be compared more exactly, however small the range

Named = Mapping[str, Tensor]
Batches = Iterable[tuple[Named, Named]]  # inputs, and torch's outputs


@dataclass
class Comparison:
    """The difference between an output of an ONNX and torch's output on the batches so far."""

    device: str = "cpu"  # where torch computed
    worst: float = 0.0  # the largest difference of a number
    lowest: float = np.inf  # of torch's outputs
    highest: float = -np.inf

    @property
    def tolerance(self) -> float:
        """The largest allowed difference. The value is final when all batches are added."""
        largest = max(abs(self.lowest), abs(self.highest))
        return TOLERANCE[self.device] * (self.highest - self.lowest) + ROUNDING * largest

    @property
    def passed(self) -> bool:
        return self.worst <= self.tolerance

    def add_batch(self, of_onnx: NDArray[np.float32], of_torch: NDArray[np.float32]) -> None:
        """Update the largest difference, and the range of torch's outputs, by the outputs of a batch."""
        differences = np.nan_to_num(np.abs(of_onnx - of_torch), nan=np.inf)
        self.worst = max(self.worst, float(differences.max(initial=0.0)))
        self.lowest = min(self.lowest, float(of_torch.min(initial=np.inf)))
        self.highest = max(self.highest, float(of_torch.max(initial=-np.inf)))


def export_onnx_if_equal(model: SavedModel, split: PreparedSet, folder: Path) -> Comparison:
    """Export a model as ONNX, compare the outputs with torch's, and write ``model.onnx`` if they are close enough.

    The ONNX runs on the whole test split, in a new process. ``folder`` must exist.

    Returns:
        The comparison of the output that is furthest from torch's output, relative to the tolerance.

    Raises:
        UnreachableError: The storage of the test split does not answer.
        NotExportedError: The extra ``export`` is not installed, or the export or the comparison failed with any other
            exception.
    """
    with TemporaryDirectory(dir=folder) as name:  # the file appears in ``folder`` only if the comparison passes
        made = Path(name)
        try:
            export = write_image_onnx_and_compare if split.pictures else write_tensor_onnx_and_compare
            found = export(model, split, made)
            if found.passed:
                (made / ONNX).rename(folder / ONNX)
        except (NotExportedError, UnreachableError):
            raise
        except Exception as error:  # a full disk, or any error of the user's model
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
            line = next((line for line in lines if "to be a constant" in line), lines[0])  # names a size that must vary
            raise NotExportedError(f"{type(cause).__name__}: {line[:200]}") from error
    return found


def write_image_onnx_and_compare(model: SavedModel, data: PreparedSet, folder: Path) -> Comparison:
    """Write ``model.onnx`` of a model of images, and compare its outputs with torch's on the whole test split.

    The ONNX crops, resizes and normalises images of any size. The file is written into ``folder`` whatever the
    comparison finds. The ONNX runs in a new process. Silences loggers, warnings and stderr of this process during the
    export. Skips images that cannot be decoded. Exceptions of torch's exporters pass through.

    Raises:
        NotExportedError: The extra ``export`` is not installed.
        UnreachableError: The storage of the test split does not answer.
        UserError: The model does not accept the images, or more images cannot be decoded than allowed.
        OSError: The file cannot be written, or the ONNX cannot be run.
    """
    served = ServedImages(*artifacts.load_model(*model.files)).eval()
    shape = 2, served.height + 1, served.width + 2, served.channels  # two images: exporters treat 1 as a constant
    example = {"images": torch.arange(int(np.prod(shape))).remainder(251).to(torch.uint8).reshape(shape)}
    sizes = {"images": {place: Dim(name, min=min(place + 1, 2)) for place, name in enumerate("nhw")}}
    write_onnx(served, example, sizes, folder)

    def compute_logits() -> Iterator[Tensor]:
        """Yield torch's logits for each decoded image of the test split."""
        for batch in read_test_batches(model, data):
            if len(batch.inputs):
                yield from extract_mask_logits(model.compute_outputs(batch.inputs)).float().cpu()

    def make_batches() -> Batches:
        """Yield each image alone in its original size, with torch's logits.

        The first image is also repeated to larger BATCH_SIZES.
        """
        images = data.iterate_test_images(model.make_test_opening())
        for place, (image, row) in enumerate(zip(images, compute_logits(), strict=True)):
            coloured = np.repeat(image, served.channels // image.shape[2], axis=2)
            sizes = [size for size in BATCH_SIZES if size * coloured.nbytes <= MOST_BYTES] if place == 0 else []
            for size in sizes or BATCH_SIZES[:1]:
                pixels = torch.from_numpy(np.repeat(coloured[None], size, 0))
                yield {"images": pixels}, {"logits": row.expand(size, *row.shape)}

    return compare_onnx_with_torch(folder / ONNX, make_batches(), model.device.type)


def write_tensor_onnx_and_compare(model: SavedModel, data: PreparedSet, folder: Path) -> Comparison:
    """Write ``model.onnx`` of a model of other data than images, and compare its outputs with torch's.

    The comparison uses the whole test split. Torch computes on the CPU, and the ONNX runs in a new process. Silences
    loggers, warnings and stderr of this process during the export. Exceptions of torch's exporters pass through.

    Raises:
        NotExportedError: The extra ``export`` is not installed, or the exporter cannot name inputs and outputs.
        OSError: The file cannot be written, or the ONNX cannot be run.
    """
    on_cpu, _ = artifacts.load_model(*model.files)
    opening = Opening(torch.device("cpu"), model.settings, collate=model.collate, seed=model.seed)
    test, spec = data.open_test_split(opening)
    assert isinstance(spec, LeavesSpec)  # pictures are exported by write_image_onnx_and_compare
    with closing(test.source):
        samples = test.order.samples_at(slice(0, EXAMPLE))
        inputs = test.load_batch(samples).inputs
        example, served = (
            name_input_tensors(inputs, spec, model.collate),
            ServedLeaves(on_cpu, get_leaves_form(inputs)).eval(),
        )
        outputs = write_onnx(served, example, make_dynamic_shapes(example, spec, model.collate, len(samples)), folder)
        row_bytes = sum(values.nbytes for values in outputs.values()) / len(samples)

        def compute_batches() -> Batches:
            """Yield inputs and torch's outputs for the whole test split.

            Repeats the split with each of BATCH_SIZES that fits into memory.
            """
            for size in BATCH_SIZES:
                if size > EXAMPLE and size * row_bytes > BATCH_BYTES:
                    continue
                for _, batch in test.load_evaluation_batches(size, 0, 1):
                    named = name_input_tensors(batch.inputs, spec, model.collate)
                    with torch.no_grad():
                        yield named, served(named)

        return compare_onnx_with_torch(folder / ONNX, compute_batches(), "cpu")


def compare_onnx_with_torch(path: Path, batches: Batches, device: str) -> Comparison:
    """Run an ONNX file on batches in a new process, and return the comparison of the worst output with torch's.

    Args:
        path: The ONNX file.
        batches: Pairs of inputs and torch's outputs, each by name. At least one batch is needed.
        device: The type of the device on which torch computed.

    Raises:
        OSError: The ONNX cannot be run.
    """
    found = defaultdict[str, Comparison](lambda: Comparison(device))
    with OnnxProcess(path, count_cores()) as onnx:
        for inputs, of_torch in batches:
            of_onnx = onnx.compute_batch_outputs({name: values.numpy() for name, values in inputs.items()})
            for name, values in of_torch.items():
                found[name].add_batch(of_onnx[name], values.numpy())
    return max(found.values(), key=lambda each: (not each.passed, each.worst / (each.tolerance or 1)))


def name_input_tensors(inputs: Leaves, spec: LeavesSpec, collate: str) -> dict[str, Tensor]:
    """Return the input tensors of a batch by name, as float32, int64 or bool.

    The names are a dict's keys. A single tensor is ``inputs``, and the tensors of a tuple are ``inputs_0``,
    ``inputs_1``, ... The last tensor of a padded batch is ``mask``. ``spec`` describes a single sample.

    Raises:
        NotExportedError: An input is not a tensor.
    """
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        leaves = [*inputs] if isinstance(inputs, tuple) else [inputs]
        masked = collate == PADDED and len(leaves) > len(spec.leaves)
        count = len(leaves) - masked
        names = ["inputs"] if count == 1 else [f"inputs_{place}" for place in range(count)]
        named = dict(zip([*names, *[MASK] * masked], leaves, strict=True))
    if not all(isinstance(leaf, Tensor) for leaf in named.values()):
        raise NotExportedError("its inputs must be a tensor, or a tuple or dict of tensors")
    return {name: widen_type(leaf) for name, leaf in named.items()}


def make_dynamic_shapes(named: Named, spec: LeavesSpec, collate: str, samples: int) -> dict[str, dict[int, Any]]:
    """Return torch.export's dynamic shapes: which dimensions of the input tensors differ between batches.

    Args:
        named: The tensors of a batch by name, as :func:`name_input_tensors` returns them.
        spec: The description of a single sample.
        collate: The hyperparameter ``collate``. For a user-defined function, the exporter finds the dimensions.
        samples: The number of samples in the batch. A tensor of another length has no dimension of samples.

    Returns:
        For each tensor, by name: the exporter's sizes, by the number of the dimension.
    """
    number = Dim("n", min=1)
    names = named if spec.form != "dict" else (name for name, _ in spec.leaves)
    shapes = dict(zip(names, (leaf.shape for _, leaf in spec.leaves), strict=False))  # without the mask, which is last
    sizes = dict[str, dict[int, Any]]()
    for name, leaf in named.items():
        if ":" in collate:
            others = dict.fromkeys(range(leaf.dim()), Dim.AUTO)
        else:
            lengths = shapes.get(name, (None,))  # the mask is [n, length]
            others = {place: Dim.DYNAMIC for place, length in enumerate(lengths, 1) if length is None}
        sizes[name] = others | ({0: number} if leaf.shape[:1] == (samples,) else {})
    return sizes
