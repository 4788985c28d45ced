"""Checkpoints on disk: two files, written in turn, so that a good one is there whatever happens to the other.

A file holds its SHA-256, a header (a line of JSON), the metrics so far, and what torch saved. All but the last can be
read without torch.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flyte_ddp import results
from flyte_ddp.errors import UserError
from flyte_ddp.files import HashingFile, replacing
from flyte_ddp.runs.arithmetic import Arithmetic

FOLDER = "checkpoints"  # in the run folder
SLOTS = ("a.ckpt", "b.ckpt")
FORMAT = "flyte-ddp-checkpoint/1"
DIGEST_LINE = len(f"{FORMAT} {'0' * 64}\n")


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: only a run with the same identity can resume from it.

    The number of ranks is left out, because it changes who computes and not what is computed. So is what the ranks run
    on, which changes what is computed by rounding alone: see :mod:`flyte_ddp.runs.arithmetic`.
    """

    hyperparameters: dict[str, Any]  # without num_ranks
    data: str  # content digest of the prepared data; the next three likewise
    code: str
    user_code: str
    initial_weights: str
    releases: str  # of torch and torchvision


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: Path
    epoch: int  # epochs that are done, with their evaluation
    step: int  # optimiser steps that are done
    trained_in: tuple[Arithmetic, ...]  # all that it was trained in so far
    time: float
    identity: Identity
    metrics: bytes
    offset: int  # of what torch saved, in the file


def slots(folder: Path, newest: Path | None) -> Iterator[Path]:
    """Where the next checkpoints go: in turn, beginning with the one that is not the newest."""
    first = 1 if newest is not None and newest.name == SLOTS[0] else 0
    return itertools.cycle(folder / name for name in (SLOTS[first], SLOTS[1 - first]))


def write(
    path: Path, description: Mapping[str, Any], identity: Identity, metrics: bytes, save: Callable[[Any], object]
) -> None:
    """Writes a checkpoint in place of an older one; UserError if the disk is full.

    Args:
        description: ``epoch``, ``step``, ``trained_in`` and ``time``.
        metrics: contents of metrics.jsonl up to this step.
        save: writes the state into a file.
    """
    header = {**description, "identity": asdict(identity), "metrics_bytes": len(metrics)}
    with replacing(path) as file:
        file.write(b" " * DIGEST_LINE)
        hashing = HashingFile(file)
        hashing.write(json.dumps(header).encode() + b"\n")
        hashing.write(metrics)
        save(hashing)
        file.seek(0)
        file.write(f"{FORMAT} {hashing.sha256.hexdigest()}\n".encode())


def newest_of(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are skipped."""
    found = [checkpoint for name in SLOTS if (checkpoint := read(folder / name)) is not None]
    return max(found, key=lambda checkpoint: (checkpoint.step, checkpoint.epoch), default=None)


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in a file; None if there is none, or it is damaged."""
    try:
        with path.open("rb") as file:
            digest_line = file.read(DIGEST_LINE)
            if digest_line != f"{FORMAT} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode():
                return None
            file.seek(DIGEST_LINE)
            header = json.loads(file.readline())
            metrics = file.read(header.pop("metrics_bytes"))
            identity = Identity(**header.pop("identity"))
            trained_in = tuple(Arithmetic(**entry) for entry in header.pop("trained_in"))
            return Checkpoint(
                path, **header, identity=identity, trained_in=trained_in, metrics=metrics, offset=file.tell()
            )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def state_in(checkpoint: Checkpoint) -> io.BytesIO:
    """What torch saved."""
    with checkpoint.path.open("rb") as file:
        file.seek(checkpoint.offset)
        return io.BytesIO(file.read())


def load_latest(run_folder: Path, run: Identity) -> Checkpoint | None:
    """The run's newest checkpoint, if there is one; UserError if it is of another run.

    The run's metrics are then as they were when it was written. Without one, there are no metrics, and no intermediate
    results.
    """
    found = newest_of(run_folder / FOLDER)
    if found is not None:
        check_belongs(found, run)
    with replacing(run_folder / "metrics.jsonl") as file:
        file.write(found.metrics if found else b"")
    if found is None:
        shutil.rmtree(run_folder / results.FOLDER, ignore_errors=True)
        return None
    return replace(found, metrics=b"")  # the ranks have no use for them


def check_belongs(checkpoint: Checkpoint, run: Identity) -> None:
    """Refuses, with what is different, a checkpoint of another run."""
    theirs, ours = asdict(checkpoint.identity), asdict(run)
    before, now = theirs.pop("hyperparameters"), ours.pop("hyperparameters")
    words = {"code": "code of flyte_ddp", "user_code": "code of the model", "initial_weights": "initial weights"}
    reasons = [
        f"{name}={before.get(name)!r}, now {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ] + [
        f"other {words.get(name, name)} ({was}, now {ours[name]})" for name, was in theirs.items() if was != ours[name]
    ]
    if reasons:
        raise UserError(
            f"{checkpoint.path} belongs to another run: {'; '.join(reasons)}; "
            "go back to what it was made with, or delete it to restart from scratch"
        )
