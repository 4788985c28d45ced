"""Exporting a model whose inputs are no images: inputs and outputs have names, and samples may differ in length."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim

from flyte_ddp.datasets.prepared import ItemSet
from flyte_ddp.export.comparison import BATCH_SIZES, GOLDEN_BYTES, TOLERANCE, Comparison, choose_requests
from flyte_ddp.export.graphs import ONNX, NotExportedError, write_graphs
from flyte_ddp.export.onnx_process import OnnxProcess
from flyte_ddp.export.served import ServedLeaves
from flyte_ddp.leaves import Leaves, form_of
from flyte_ddp.loading.collate import MASK, PADDED, STACKED, widen_type
from flyte_ddp.loading.opening_items import open_item_test_split
from flyte_ddp.machine import count_cores
from flyte_ddp.models.inputs import LeavesSpec
from flyte_ddp.objectives import Classification
from flyte_ddp.objectives.own import objective_of_sidecar
from flyte_ddp.settings import Settings

ROUNDING = 1e-5  # of the largest number of an output: float32 cannot be compared more exactly, however small the range

EXAMPLE = 7  # samples of the batch that exporters follow through the model
BATCH_BYTES = 2**30  # of the outputs of a batch of more samples than that: a text's may have 50,000 for each token

Named = Mapping[str, Tensor]


def export_leaves_model(
    model: nn.Module, sidecar: Mapping[str, Any], data: ItemSet, folder: Path, settings: Settings
) -> tuple[Comparison, dict[str, Any]]:
    """Write ``model.onnx`` and ``model.pt2`` into a folder, and compare the ONNX with torch on all test samples.

    Returns the comparison of the output that is furthest from torch's for its range, and golden requests: the arrays
    ``<number of the sample>/inputs/<name>``, ``<number>/outputs/<name>``, and ``tolerance/<name>`` of each output.
    Leaves out batches of 64 whose outputs would be larger than BATCH_BYTES (1 GiB). Raises NotExportedError for inputs
    or outputs without names.
    """
    hyperparameters = sidecar.get("hyperparameters", {})
    collate, seed = str(hyperparameters.get("collate", STACKED)), int(hyperparameters.get("seed", 0))
    threads = settings.loaders or count_cores()
    test, spec = open_item_test_split(data, collate, seed, torch.device("cpu"), threads)
    assert isinstance(spec, LeavesSpec)  # pictures are exported as those of arrays are
    name_batch = partial(name_inputs, spec=spec, collate=collate)
    with closing(test.source):
        samples = test.order.samples(slice(0, EXAMPLE))
        inputs = test.load_batch(samples).inputs
        example = name_batch(inputs)
        served = ServedLeaves(model, form_of(inputs)).eval()
        with torch.no_grad():
            outputs = served(example)
        if not outputs:
            raise NotExportedError("its outputs hold no tensor of floats by name")
        sizes = choose_sizes(example, spec, collate, len(samples))
        write_graphs(served, example, sizes, folder, inputs=[*example], outputs=[*outputs])
        of_classes = len(outputs) == 1 and isinstance(objective_of_sidecar(sidecar), Classification)
        found = {name: Comparison(of_classes=of_classes) for name in outputs}
        row_bytes = sum(values.nbytes for values in outputs.values()) / len(samples)
        batches = (
            (place, name_batch(batch.inputs))
            for size in BATCH_SIZES
            if size <= EXAMPLE or size * row_bytes <= BATCH_BYTES
            for place, batch in test.load_evaluation_batches(size, 0, 1)
        )
        golden = compare_outputs(folder / ONNX, served, batches, choose_requests(len(test)), found)
    for name, each in found.items():
        largest = max(abs(each.lowest), abs(each.highest))
        each.tolerance = TOLERANCE["cpu"] * (each.highest - each.lowest) + ROUNDING * largest
        golden[f"tolerance/{name}"] = each.tolerance
    return max(found.values(), key=lambda each: (not each.passed, each.worst / (each.tolerance or 1))), golden


def name_inputs(inputs: Leaves, spec: LeavesSpec, collate: str) -> dict[str, Tensor]:
    """Return the leaves of a batch by name, as float32, int64 or bool; NotExportedError if they are no tensors.

    Those of a dict have their keys. A leaf is called ``inputs``, those of a tuple ``inputs_0``, ``inputs_1``, ...; the
    mask of padded ones ``mask``. ``spec`` is of a sample.
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
        raise NotExportedError("its inputs are no tensor, and no tuple or dict of tensors")
    return {name: widen_type(leaf) for name, leaf in named.items()}


def choose_sizes(named: Named, spec: LeavesSpec, collate: str, samples: int) -> dict[str, dict[int, Any]]:
    """Return which dimensions of a batch's leaves differ between batches, each with a size for the exporter."""
    number = Dim("n", min=1)
    names = named if spec.form != "dict" else (name for name, _ in spec.leaves)
    shapes = dict(zip(names, (leaf.shape for _, leaf in spec.leaves), strict=False))  # the mask comes last
    sizes = dict[str, dict[int, Any]]()
    for name, leaf in named.items():
        if ":" in collate:
            others = dict.fromkeys(range(leaf.dim()), Dim.AUTO)
        else:
            lengths = shapes.get(name, (None,))  # the mask has the lengths of the leaves
            others = {place: Dim.DYNAMIC for place, length in enumerate(lengths, 1) if length is None}
        sizes[name] = others | ({0: number} if leaf.shape[:1] == (samples,) else {})
    return sizes


def compare_outputs(
    path: Path,
    served: ServedLeaves,
    batches: Iterator[tuple[slice, Named]],
    chosen: set[int],
    found: Mapping[str, Comparison],
) -> dict[str, Any]:
    """Run the ONNX at ``path`` on batches in a new process; add each output's differences from torch's to ``found``.

    Returns golden requests of the ``chosen`` samples, of GOLDEN_BYTES (32 MiB) in all, but at least one.
    """
    golden, size_of_golden = dict[str, Any](), 0
    with OnnxProcess(path, count_cores()) as onnx:
        for place, inputs in batches:
            with torch.no_grad():
                arrays, of_torch = tensors_to_arrays(inputs), tensors_to_arrays(served(inputs))
            of_onnx = onnx.compute_outputs(arrays)
            for name, each in found.items():
                each.add_batch(place.start, of_onnx[name], of_torch[name])
            if place.stop - place.start == 1 and place.start in chosen:
                parts = {"inputs": arrays, "outputs": of_torch}
                start = f"{place.start:09d}"
                request = {f"{start}/{part}/{name}": parts[part][name] for part in parts for name in parts[part]}
                nbytes = sum(values.nbytes for values in request.values())
                if not golden or size_of_golden + nbytes <= GOLDEN_BYTES:
                    golden, size_of_golden = golden | request, size_of_golden + nbytes
    return golden


def tensors_to_arrays(named: Named) -> dict[str, NDArray[Any]]:
    return {name: values.numpy() for name, values in named.items()}
