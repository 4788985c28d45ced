"""A trained model and images to a table of predictions."""

from __future__ import annotations

import codecs
import csv
from pathlib import Path

import torch

from flyte_ddp import artifacts
from flyte_ddp.datasets import ImageArrays, open_prepared
from flyte_ddp.errors import UserError
from flyte_ddp.files import replacing
from flyte_ddp.prediction_batches import array_batches, encoded_batches, folder_batches
from flyte_ddp.settings import Settings


def predict(
    model_path: Path,
    sidecar_path: Path,
    *,
    images: Path | None,
    dataset: Path | None,
    output: Path,
    batch_size: int = 500,
    settings: Settings | None = None,
) -> Path:
    """Writes a CSV table with one row for each image.

    Its columns are ``id`` (path below ``images``, or index in the test split), ``guess`` (the likeliest class),
    ``truth`` (for a data set), ``score`` (the guess's probability) and ``score_<class>`` for every class.

    Args:
        model_path: ``model.pt`` of a run.
        sidecar_path: ``model.json`` of the same run.
        images: a folder of images, searched at all depths; files of other types and hidden ones are passed over.
        dataset: a prepared data set's folder, whose test split is predicted. Give this or ``images``.
        output: the table's path.
        batch_size: images in memory at a time.
        settings: for shards: where they are cached, and how many threads decode.

    Raises:
        UserError: a missing, damaged or mismatched model; no images, or one that cannot be read; images whose channels
            the model does not take; an output that cannot be written.

    """
    if (images is None) == (dataset is None):
        raise UserError(f"images={images}, dataset={dataset}: give exactly one of the two")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: must be at least 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, sidecar = artifacts.load_model(model_path, sidecar_path, device)
    classes = [str(name) for name in sidecar["classes"]]
    spec, crop = artifacts.input_spec(sidecar), artifacts.input_crop(sidecar)
    if images is not None:
        batches = folder_batches(images, spec, crop, batch_size, device)
    elif dataset is not None:
        data = open_prepared(dataset)
        if isinstance(data, ImageArrays):
            batches = array_batches(data, spec, batch_size, device)
        else:
            batches = encoded_batches(
                data,
                spec,
                batch_size,
                device,
                classes=classes,
                bad_samples=sidecar.get("hyperparameters", {}).get("bad_samples", 0),
                settings=settings or Settings(),
            )

    truth_column = ["truth"] if dataset is not None else []
    with replacing(output) as file, torch.inference_mode():
        # surrogateescape: file names that are not UTF-8 go through as they are.
        table = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"), lineterminator="\n")
        table.writerow(["id", "guess", *truth_column, "score", *(f"score_{name}" for name in classes)])
        for ids, truths, batch in batches:
            logits = model(batch).float()
            scores = torch.softmax(logits, dim=1).tolist()
            guesses = logits.argmax(dim=1).tolist()
            for row, (name, guess) in enumerate(zip(ids, guesses, strict=True)):
                truth = [] if truths is None else [truths[row]]
                numbers = [f"{score:.6g}" for score in (scores[row][guess], *scores[row])]
                table.writerow([name, classes[guess], *truth, *numbers])
    return output
