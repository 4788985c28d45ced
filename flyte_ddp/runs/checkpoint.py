"""Checkpoints on disk: two files, written in turn, so that a good one is there whatever happens to the other.

A file holds its SHA-256, a header (a line of JSON), the metrics so far, and what torch saved. All but the last can be
read without torch.
"""

import hashlib
import io
import itertools
import json
import re
import shutil
import sys
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
    releases: str  # of what computes, see code_digest.ARITHMETIC


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
    """Yield without end the paths of the next checkpoints: in turn, beginning with the one that is not the newest."""
    first = 1 if newest is not None and newest.name == SLOTS[0] else 0
    return itertools.cycle(folder / name for name in (SLOTS[first], SLOTS[1 - first]))


def write(
    path: Path, description: Mapping[str, Any], identity: Identity, metrics: bytes, save: Callable[[Any], object]
) -> None:
    """Write a checkpoint in place of an older one; UserError if it cannot be written, such as to a full disk.

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


class UnreadableError(Exception):
    """A checkpoint is there and cannot be read; the text is the reason."""


def find_newest(folder: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Read the checkpoints of a folder.

    Returns:
        The newest one that can be read, None without one; and of each one that cannot be read, why not.
    """
    readable: list[Checkpoint] = []
    unreadable: dict[Path, str] = {}
    for name in SLOTS:
        try:
            found = read(folder / name)
        except UnreadableError as reason:
            unreadable[folder / name] = str(reason)
        else:
            readable += [found] if found is not None else []
    return max(readable, key=lambda checkpoint: (checkpoint.step, checkpoint.epoch), default=None), unreadable


def newest_of(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a folder that can be read; None without one."""
    return find_newest(folder)[0]


def newest_step(run_folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint: 0 if the run has none, None if it has some and none can be read."""
    found, unreadable = find_newest(run_folder / FOLDER)
    if found is not None:
        return found.step
    return None if unreadable else 0


def read(path: Path) -> Checkpoint | None:
    """Read a checkpoint's header and metrics, and compare its content with its SHA-256; the state stays in the file.

    Returns:
        None if there is no such file.

    Raises:
        UnreadableError: the system does not let the file be read, or it is damaged, or of another release's format.
    """
    try:
        with path.open("rb") as file:
            digest_line = file.read(DIGEST_LINE)
            its_format = digest_line.partition(b" ")[0].decode(errors="replace")
            if its_format != FORMAT and re.fullmatch(r"flyte-ddp-checkpoint/\d+", its_format):
                raise UnreadableError(f"its format is {its_format}, and this release reads {FORMAT}")
            if digest_line != f"{FORMAT} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode():
                raise UnreadableError("damaged: its content does not match its SHA-256")
            file.seek(DIGEST_LINE)
            header = json.loads(file.readline())
            metrics = file.read(header.pop("metrics_bytes"))
            identity = Identity(**header.pop("identity"))
            trained_in = tuple(Arithmetic(**entry) for entry in header.pop("trained_in"))
            return Checkpoint(
                path, **header, identity=identity, trained_in=trained_in, metrics=metrics, offset=file.tell()
            )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError("its header is another release's") from error


def state_in(checkpoint: Checkpoint) -> io.BytesIO:
    """Return what torch saved, read whole into memory."""
    with checkpoint.path.open("rb") as file:
        file.seek(checkpoint.offset)
        return io.BytesIO(file.read())


def load_latest(run_folder: Path, run: Identity) -> Checkpoint | None:
    """Return the run's newest checkpoint, and put the run's metrics back to what they were when it was written.

    Without any checkpoint, empties metrics.jsonl and removes the intermediate results. Prints to stderr which
    checkpoint beside the one that is used cannot be read.

    Raises:
        UserError: the checkpoint is of another run, or there are checkpoints and none can be read; nothing is changed.
    """
    found, unreadable = find_newest(run_folder / FOLDER)
    reasons = " and ".join(f"{path} ({why})" for path, why in unreadable.items())
    if found is None and unreadable:
        one = len(unreadable) == 1
        raise UserError(
            f"cannot read the run's {'only checkpoint' if one else 'checkpoints'} {reasons}: make "
            f"{'it' if one else 'one of them'} readable to go on from it, or delete {'it' if one else 'them'} to "
            "restart from scratch; metrics and results are as they were"
        )
    if found is not None:
        if unreadable:
            said = f"{reasons} cannot be used; {found.path.name} is, of step {found.step:,}"
            print(f"checkpoint {said}", file=sys.stderr, flush=True)
        check_belongs(found, run)
    with replacing(run_folder / "metrics.jsonl") as file:
        file.write(found.metrics if found else b"")
    if found is None:
        shutil.rmtree(run_folder / results.FOLDER, ignore_errors=True)
        return None
    return replace(found, metrics=b"")  # the ranks have no use for them


def check_belongs(checkpoint: Checkpoint, run: Identity) -> None:
    """Raise UserError, with what is different, for a checkpoint of another run."""
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
