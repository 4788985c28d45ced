"""Evaluations of a judgement that has no verdict yet, kept in the registry: a judgement that was stopped goes on."""

import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from flyte_ddp import storage
from flyte_ddp.code_digest import library_digest
from flyte_ddp.datasets.prepared import PreparedSet
from flyte_ddp.errors import UserError
from flyte_ddp.predict.prediction_batches import SavedModel
from flyte_ddp.release.evaluation import Evaluation, evaluate_split
from flyte_ddp.release.registry import Registry

FOLDER = "evaluations"


def evaluate_once(
    registry: Registry, test_digest: str, model: SavedModel, split: PreparedSet, challenger: Mapping[str, Any]
) -> Evaluation:
    """Return a model's evaluation; read it from the registry, or compute it and, if finite, write it there."""
    parts = [
        library_digest(),
        model.digest,
        *(json.dumps(each, sort_keys=True) for each in (model.sidecar, challenger)),
    ]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    address = registry.at("judgements", test_digest, FOLDER, f"{key}.pt")
    if content := registry.read_file(address):
        kept = torch.load(io.BytesIO(content), weights_only=True)
        finite, scores = kept.pop("finite").numpy(), kept.pop("scores").numpy()
        found = Evaluation(model.objective, finite=finite, **kept)
        found.scores = scores
        return found
    found = evaluate_split(model, split)
    if found.finite.all():
        names = ("columns", "measures", "ids", "undecoded")
        arrays = {"finite": torch.from_numpy(found.finite), "scores": torch.from_numpy(found.scores)}
        file = io.BytesIO()
        torch.save({name: getattr(found, name) for name in names} | arrays, file)
        registry.create_file(address, file.getvalue())
    return found


def delete_evaluations(registry: Registry, test_digest: str) -> None:
    folder = registry.at("judgements", test_digest, FOLDER)
    with suppress(UserError, storage.UnavailableError):  # what stays costs space only
        storage.delete_files([storage.join(folder, name) for name in registry.list_files(folder)])
