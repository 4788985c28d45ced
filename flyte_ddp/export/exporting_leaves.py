"""Exporting a model whose inputs are no images: inputs and outputs have names, and samples may differ in length."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.export import Dim

from flyte_ddp.datasets.prepared import ItemSet
from flyte_ddp.export.comparison import BATCH_SIZES, Batches, Comparison, compare_outputs
from flyte_ddp.export.graphs import ONNX, NotExportedError, write_onnx
from flyte_ddp.export.served import ServedLeaves
from flyte_ddp.loading.collate import MASK, PADDED, STACKED, widen_type
from flyte_ddp.loading.opening_items import open_item_test_split
from flyte_ddp.machine.resources import count_cores
from flyte_ddp.models import artifacts
from flyte_ddp.models.inputs import LeavesSpec
from flyte_ddp.objectives import Classification
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.samples.leaves import Leaves, form_of

EXAMPLE = 7  # samples of the batch that exporters follow through the model
BATCH_BYTES = 2**30  # of the outputs of a batch of more samples than that: a text's may have 50,000 for each token

Named = Mapping[str, Tensor]


def export_leaves_model(model: SavedModel, data: ItemSet, folder: Path) -> Comparison:
    """Write ``model.onnx`` into a folder; return :func:`compare_outputs` on all test samples.

    Leaves out batches of 64 whose outputs would be larger than BATCH_BYTES (1 GiB). Raises NotExportedError for inputs
    or outputs without names.
    """
    on_cpu, sidecar = artifacts.load_model(*model.files)
    hyperparameters = sidecar.get("hyperparameters", {})
    collate, seed = str(hyperparameters.get("collate", STACKED)), int(hyperparameters.get("seed", 0))
    threads = model.settings.loaders or count_cores()
    test, spec = open_item_test_split(data, collate, seed, torch.device("cpu"), threads)
    assert isinstance(spec, LeavesSpec)  # pictures are exported as those of arrays are
    with closing(test.source):
        samples = test.order.samples(slice(0, EXAMPLE))
        inputs = test.load_batch(samples).inputs
        example = name_inputs(inputs, spec, collate)
        served = ServedLeaves(on_cpu, form_of(inputs)).eval()
        with torch.no_grad():
            outputs = served(example)
        if not outputs:
            raise NotExportedError("its outputs hold no tensor of floats by name")
        sizes = choose_sizes(example, spec, collate, len(samples))
        write_onnx(served, example, sizes, folder, inputs=[*example], outputs=[*outputs])
        of_classes = len(outputs) == 1 and isinstance(model.objective, Classification)
        row_bytes = sum(values.nbytes for values in outputs.values()) / len(samples)

        def compute_batches() -> Batches:
            for size in BATCH_SIZES:
                if size > EXAMPLE and size * row_bytes > BATCH_BYTES:
                    continue
                for place, batch in test.load_evaluation_batches(size, 0, 1):
                    named = name_inputs(batch.inputs, spec, collate)
                    with torch.no_grad():
                        yield range(place.start, place.stop), tensors_to_arrays(named), tensors_to_arrays(served(named))

        found = {name: Comparison(of_classes=of_classes) for name in outputs}
        return compare_outputs(folder / ONNX, compute_batches(), found)


def name_inputs(inputs: Leaves, spec: LeavesSpec, collate: str) -> dict[str, Tensor]:
    """Return the leaves of a batch by name, as float32, int64 or bool; NotExportedError if they are no tensors.

    A dict has its keys. One leaf is called ``inputs``, the leaves of a tuple ``inputs_0``, ``inputs_1``, ...; a padded
    batch's last one is ``mask``. ``spec`` describes one sample.
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


def tensors_to_arrays(named: Named) -> dict[str, NDArray[Any]]:
    return {name: values.numpy() for name, values in named.items()}
