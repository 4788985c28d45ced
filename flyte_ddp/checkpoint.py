"""Checkpoints on disk: two files, written in turn, so that a good one is there whatever happens to the other.

A file is its SHA-256, a line of JSON that says what it belongs to and how far it got, the metrics so far, and what
torch saved. All but the last can be read without torch.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flyte_ddp import results
from flyte_ddp.arithmetic import Arithmetic
from flyte_ddp.config import Hyperparameters
from flyte_ddp.errors import UserError
from flyte_ddp.files import HashingFile, replacing

FOLDER = "checkpoints"  # in the run folder
SLOTS = ("a.ckpt", "b.ckpt")
FORMAT = "flyte-ddp-checkpoint/1"
DIGEST_LINE = len(f"{FORMAT} {'0' * 64}\n")


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: only a run with the same can go on from it."""

    hyperparameters: dict[str, Any]
    data: str
    code: str
    user_code: str
    initial_weights: str
    releases: str = ""


def identity(
    hp: Hyperparameters, *, data: str, code: str, user_code: str = "", initial_weights: str = "", releases: str = ""
) -> Identity:
    """Of a run; the number of ranks is left out, because it changes who computes and not what is computed.

    So is what the ranks run on, which changes what is computed by rounding alone: see :mod:`flyte_ddp.arithmetic`.

    Args:
        data: content digest of the prepared data; ``code``, ``user_code`` and ``initial_weights`` likewise.
        releases: of torch and torchvision.

    """
    values = {name: value for name, value in hp.to_dict().items() if name != "num_ranks"}
    return Identity(values, data, code, user_code, initial_weights, releases)


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
    """Writes a checkpoint in place of an older one.

    Args:
        path: from :func:`slots`.
        description: ``epoch``, ``step``, ``trained_in`` and ``time``.
        metrics: contents of metrics.jsonl up to this step.
        save: writes the state into a file.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.

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
    """The newest checkpoint that is whole; damaged ones are passed over."""
    found = [checkpoint for name in SLOTS if (checkpoint := read(folder / name)) is not None]
    return max(found, key=lambda checkpoint: (checkpoint.step, checkpoint.epoch), default=None)


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in a file; None if there is none, or it is damaged."""
    try:
        with path.open("rb", buffering=0) as whole, io.BufferedReader(whole) as file:
            digest_line = whole.read(DIGEST_LINE)
            if digest_line != f"{FORMAT} {hashlib.file_digest(whole, 'sha256').hexdigest()}\n".encode():
                return None
            file.seek(DIGEST_LINE)
            header = json.loads(file.readline())
            offset = file.tell() + header["metrics_bytes"]
            check_header(header, most_bytes=path.stat().st_size - file.tell())
            metrics = file.read(header["metrics_bytes"])
            identity = Identity(**header["identity"])
            trained_in = tuple(Arithmetic(**entry) for entry in header["trained_in"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return Checkpoint(
        path=path,
        epoch=header["epoch"],
        step=header["step"],
        trained_in=trained_in,
        time=header["time"],
        identity=identity,
        metrics=metrics,
        offset=offset,
    )


def check_header(header: Any, most_bytes: int) -> None:
    """Raises one of many errors for a header that :func:`write` has not written."""
    counts = [header[name] for name in ("epoch", "step", "metrics_bytes")]
    right = all(isinstance(count, int) and count >= 0 for count in counts) and counts[-1] <= most_bytes
    right = right and bool(header["trained_in"]) and isinstance(header["identity"]["hyperparameters"], dict)
    if not right:
        raise ValueError(header)
    datetime.fromtimestamp(header["time"])  # noqa: DTZ006 (as a person is told)


def state_in(checkpoint: Checkpoint) -> io.BytesIO:
    """What torch saved."""
    with checkpoint.path.open("rb") as file:
        file.seek(checkpoint.offset)
        return io.BytesIO(file.read())


def go_on_from(run_folder: Path, run: Identity) -> Checkpoint | None:
    """The run's newest checkpoint, if there is one; its metrics are then as they were when that was written.

    Without one, there are no metrics, and no intermediate results.

    Raises:
        UserError: a checkpoint of another run.

    """
    found = newest_of(run_folder / FOLDER)
    if found is not None:
        check_belongs(found, run)
    with replacing(run_folder / "metrics.jsonl") as file:
        file.write(found.metrics if found else b"")
    if found is None:
        shutil.rmtree(run_folder / results.FOLDER, ignore_errors=True)
    return replace(found, metrics=b"") if found else None  # the ranks have no use for them


def check_belongs(checkpoint: Checkpoint, run: Identity) -> None:
    """Refuses a checkpoint of another run.

    Raises:
        UserError: what is different.

    """
    theirs, ours = asdict(checkpoint.identity), asdict(run)
    if theirs == ours:
        return
    reasons = [
        f"{name}={theirs['hyperparameters'].get(name)!r}, now {ours['hyperparameters'].get(name)!r}"
        for name in {**theirs["hyperparameters"], **ours["hyperparameters"]}
        if theirs["hyperparameters"].get(name) != ours["hyperparameters"].get(name)
    ]
    words = {
        "data": "other data",
        "code": "other code of flyte_ddp",
        "user_code": "other code of the model",
        "initial_weights": "other initial weights",
        "releases": "other releases",
    }
    reasons += [f"{what} ({theirs[key]}, now {ours[key]})" for key, what in words.items() if theirs[key] != ours[key]]
    raise UserError(
        f"{checkpoint.path} belongs to another run: {'; '.join(reasons)}; "
        "go back to what it was made with, or delete it to restart from scratch"
    )
