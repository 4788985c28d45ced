"""Checkpoints on disk: two files, written in turn, so that one good file is left whatever happens to the other.

A file is an archive of torch.save, a dict of two entries: ``head`` has a line of JSON and the metrics so far as uint8,
``state`` has what was saved. The archive's comment holds the SHA-256 of the file without the comment.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar, get_origin, get_type_hints

from flyte_ddp import results
from flyte_ddp.checks.forms import COUNT, require_form
from flyte_ddp.checks.parsing import parse_json
from flyte_ddp.errors import UserError, print_to_stderr
from flyte_ddp.files import HashingFile, file_version, replace_file
from flyte_ddp.settings import read_text

FOLDER = "checkpoints"  # in the output folder
SLOTS = ("a.ckpt", "b.ckpt")
FORMAT = "flyte-ddp-checkpoint/2"
NAME = rb"(flyte-ddp-checkpoint/\d+)"  # of all formats
HEAD, STATE = "head", "state"  # keys of what torch.save gets
HEAD_NAME = "archive/data/0"  # of the head in torch's archive
COMMENT_BYTES = len(f"{FORMAT} {'0' * 64}")
LENGTH_BYTES = 2  # of the length of a zip archive's comment, which comes before the comment
CHUNK_BYTES = 1 << 20
QUICK_BYTES = 1 << 30  # whose SHA-256 takes a second or two
GO_ON = "FLYTE_DDP_GO_ON"
LATEST = 253_402_214_400  # the last day of the year 9999, the last of datetime, in seconds since 1970
FIELD_NAMES = {"num_ranks": "ranks", "threads": "threads of each rank", "channels_last": "channels last"}  # for texts
Result = TypeVar("Result")


class UnreadableError(Exception):
    """A checkpoint file exists and cannot be read; the text is the reason."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: only a run with the same identity can resume from it.

    Ranks, devices and precision are left out: they change who computes, and the rounding (:class:`Arithmetic`).
    """

    hyperparameters: dict[str, Any]  # without num_ranks
    data: str = ""  # digest of the prepared data's content
    code: str = ""  # digest of this library's code
    user_code: str = ""  # digest of the user's own code, but for that of the data set
    initial_weights: str = ""  # digest of the file
    releases: str = ""  # of torch and the other libraries in user_code.digest.ARITHMETIC


@dataclass(frozen=True)
class Arithmetic:
    """The settings that decide rounding: equal runs with equal values get the same bits."""

    num_ranks: int
    devices: str  # of all ranks, by rank; one name if all are equal
    precision: str
    threads: int
    channels_last: str  # "on" or "off"
    strategy: str  # of gradients; empty for one rank

    def describe_changes(self, before: Iterable[Self]) -> str:
        """Return as text the values that differ from ``before``, such as "ranks 2, now 4"; "" if no value differs."""
        words = []
        for name, now in vars(self).items():
            earlier = [*dict.fromkeys(getattr(one, name) for one in before)]
            if "" not in (now, *earlier) and earlier != [now]:
                words.append(f"{FIELD_NAMES.get(name, name)} {' and '.join(map(str, earlier))}, now {now}")
        return "; ".join(words)


def list_form(kind: type) -> dict[str, Any]:
    return {name: get_origin(each) or each for name, each in get_type_hints(kind).items()}


HEADER = {
    "epoch": COUNT,
    "step": COUNT,
    "trained_in": [list_form(Arithmetic)],
    "time": float,
    "identity": list_form(Identity),
}
# Versions of files whose SHA-256 this process has verified.
verified: set[tuple[int, int, int]] = set()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose SHA-256 was verified. The state stays in the file."""

    path: Path
    epoch: int  # epochs that are done, with their evaluation
    step: int  # optimiser steps that are done
    trained_in: tuple[Arithmetic, ...]  # one entry for each change of ranks, devices or precision
    time: float  # when it was written, in seconds since 1970
    identity: Identity
    metrics: bytes  # of metrics.jsonl up to this step

    def describe_resumption(self) -> str:
        when = datetime.fromtimestamp(min(max(self.time, 0), LATEST)).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 (local time)
        return f"going on after step {self.step:,}, saved {when}"


@dataclass(frozen=True)
class Handover:
    """What another rank must know to write a checkpoint in rank 0's place."""

    name: str  # of the file, one of SLOTS
    step: int  # of the newest checkpoint
    epoch: int
    metrics: bytes  # what rank 0 has recorded


def describe_handover(output_folder: Path) -> Handover:
    newest = verify_checkpoints(output_folder / FOLDER, most_bytes=0)[0]
    path = next_slot(output_folder / FOLDER, newest.path if newest else None)
    position = (newest.step, newest.epoch) if newest else (0, 0)
    return Handover(path.name, *position, (output_folder / "metrics.jsonl").read_bytes())


def next_slot(folder: Path, newest: Path | None) -> Path:
    """Return the path of the next checkpoint: of the two files the one that is not ``newest``."""
    return folder / (SLOTS[1] if newest is not None and newest.name == SLOTS[0] else SLOTS[0])


def write_checkpoint(checkpoint: Checkpoint, state: Mapping[str, Any]) -> Checkpoint:
    """Write a checkpoint to its path, atomically and flushed to disk; UserError if that fails.

    Returns the checkpoint without the metrics.
    """
    import torch

    values = asdict(checkpoint)
    header = {name: values[name] for name in ("epoch", "step", "trained_in", "time", "identity")}
    head = bytearray(json.dumps(header).encode() + b"\n" + checkpoint.metrics)
    with replace_file(checkpoint.path) as file:
        hashing = HashingFile(file)
        # The head comes first, where read_head() finds it.
        torch.save({HEAD: torch.frombuffer(head, dtype=torch.uint8), STATE: state}, hashing)  # type: ignore[arg-type]
        comment = f"{FORMAT} {hashing.sha256.hexdigest()}".encode()
        file.seek(-LENGTH_BYTES, os.SEEK_END)
        file.write(len(comment).to_bytes(LENGTH_BYTES, "little") + comment)
    return replace(checkpoint, metrics=b"")


def write_with_room(output_folder: Path, write: Callable[[], Result]) -> Result:
    """Return the result of ``write()``. On a full disk delete the run's older checkpoint, and call ``write()`` again.

    The newest checkpoint stays. ``write`` must raise a UserError whose cause is an OSError if it fails.
    """
    try:
        return write()
    except UserError as error:
        cause, folder = error.__cause__, output_folder / FOLDER
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        newest = verify_checkpoints(folder, most_bytes=QUICK_BYTES)[0]
        older = [folder / name for name in SLOTS if newest is not None and (folder / name) != newest.path]
        if not any(path.exists() for path in older):
            raise
        for path in older:
            path.unlink(missing_ok=True)
    return write()


def read_checkpoint(path: Path, *, most_bytes: float = math.inf) -> Checkpoint | None:
    """Return the Checkpoint of a file, or None without a file.

    The SHA-256 of each version of a file is checked once in a process, and not in a file of more than ``most_bytes``.
    A limit also leaves out the metrics. Raises UnreadableError.
    """
    try:
        with path.open("rb") as file:
            version = file_version(path)
            if version not in verified and os.fstat(file.fileno()).st_size <= most_bytes:
                verify_digest(file)
                verified.update({version} if version else ())
            header, metrics = read_head(file, with_metrics=most_bytes == math.inf)
            require_form(header, HEADER, "header")
            header["identity"] = Identity(**header["identity"])
            header["trained_in"] = tuple(Arithmetic(**entry) for entry in header["trained_in"])
            return Checkpoint(path, **header, metrics=metrics)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError("its header is another release's") from error


def verify_digest(file: BinaryIO) -> None:
    """Raise UnreadableError for a file of another format, and for a file that does not match its SHA-256."""
    start = file.read(len(FORMAT))
    left = max(0, file.seek(0, os.SEEK_END) - COMMENT_BYTES - LENGTH_BYTES)
    file.seek(0)
    sha256 = hashlib.sha256()
    while chunk := file.read(min(left, CHUNK_BYTES)):
        sha256.update(chunk)
        left -= len(chunk)
    sha256.update(bytes(LENGTH_BYTES))  # of an archive without a comment
    end = file.read()
    # The first format was no archive, and began with its name.
    named = re.match(NAME, start) or re.search(NAME + rb" [0-9a-f]{64}\Z", end)
    if named and named[1] != FORMAT.encode():
        raise UnreadableError(f"its format is {named[1].decode()}, and this release reads {FORMAT}")
    if end != COMMENT_BYTES.to_bytes(LENGTH_BYTES, "little") + f"{FORMAT} {sha256.hexdigest()}".encode():
        raise UnreadableError("damaged: its content does not match its SHA-256")


def read_head(file: BinaryIO, *, with_metrics: bool) -> tuple[dict[str, Any], bytes]:
    """Return the header and, unless left out, the metrics of a checkpoint, without torch.

    torch.save numbers tensors from 0 in the order of the values, and does not compress them. Raises
    UnreadableError for an archive that has been cut off, and ValueError for an archive without such a head.
    """
    try:
        with zipfile.ZipFile(file) as archive, archive.open(HEAD_NAME) as head:
            if len(archive.comment) != COMMENT_BYTES:
                raise UnreadableError("damaged: its end is missing")
            if archive.getinfo(HEAD_NAME).compress_type != zipfile.ZIP_STORED:
                raise ValueError("its head is compressed")
            return parse_json(head.readline()), head.read() if with_metrics else b""
    except (zipfile.BadZipFile, EOFError) as error:
        raise UnreadableError(f"damaged: {error}") from error


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the saved state, on the CPU.

    Tensors are mapped from the file: the ranks of a host share them in memory, and what keeps one keeps the file's
    place on the disk.
    """
    import torch

    state: dict[str, Any] = torch.load(checkpoint.path, map_location="cpu", mmap=True, weights_only=True)[STATE]
    return state


def verify_checkpoints(folder: Path, *, most_bytes: float = math.inf) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest readable checkpoint, or None, and the faults of unreadable files by path.

    Reads the headers of all files. Computes the SHA-256 of the newest file, and of an older file only if the newer file
    is damaged. ``most_bytes`` is that of :func:`read_checkpoint`.
    """
    unreadable: dict[Path, str] = {}

    def read(path: Path, most_bytes: float) -> Checkpoint | None:
        try:
            return read_checkpoint(path, most_bytes=most_bytes)
        except UnreadableError as reason:
            unreadable[path] = str(reason)
            return None

    # A file whose header cannot be read may be the newest.
    heads = [found for name in SLOTS if (found := read(folder / name, 0))]
    for path in [*unreadable]:
        read(path, most_bytes)  # which may know a better reason
    # A user's function may save a step more than once.
    order = lambda checkpoint: (checkpoint.step, checkpoint.epoch, checkpoint.time)  # noqa: E731
    newest_first = sorted(heads, key=order, reverse=True)
    return next(filter(None, (read(found.path, most_bytes) for found in newest_first)), None), unreadable


def trust_checkpoint(output_folder: Path, step: int) -> None:
    """Skip the SHA-256 of a run's newest checkpoint from now on, if the checkpoint is of this step.

    Call it when a rank has just written the checkpoint. The rank has computed the SHA-256 of the bytes that it wrote.
    """
    newest = verify_checkpoints(output_folder / FOLDER, most_bytes=0)[0]
    if newest is not None and newest.step == step and (version := file_version(newest.path)):
        verified.add(version)


def newest_step(output_folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint: 0 if the run has none, None if it has some and none is readable."""
    # A run that is to end has little time.
    found, unreadable = verify_checkpoints(output_folder / FOLDER, most_bytes=QUICK_BYTES)
    if found is not None:
        return found.step
    return None if unreadable else 0


def rewind_to_newest_checkpoint(output_folder: Path, identity: Identity) -> Checkpoint | None:
    """Return the run's newest checkpoint, without ``metrics``, and set metrics.jsonl back to it.

    If there is none, empties metrics.jsonl, removes ``results/`` and returns None. Raises UserError, and changes
    nothing, if there are checkpoints and none is readable, or the newest is of another run.
    """
    found, unreadable = verify_checkpoints(output_folder / FOLDER)
    reasons = " and ".join(f"{path} ({why})" for path, why in unreadable.items())
    if found is None and unreadable:
        raise UserError(
            f"cannot read the run's checkpoints {reasons}: make one of them readable to go on from it, or delete them "
            "to restart from scratch; metrics and results are unchanged"
        )
    if found is not None:
        if unreadable:
            print_to_stderr(f"checkpoint {reasons} cannot be used; {found.path.name} is used, of step {found.step:,}")
        check_same_run(found, identity)
    with replace_file(output_folder / "metrics.jsonl") as file:
        file.write(found.metrics if found else b"")
    if found is None:
        shutil.rmtree(output_folder / results.FOLDER, ignore_errors=True)
        return None
    return replace(found, metrics=b"")  # the ranks, to which it is sent, do not need the metrics


def check_same_run(checkpoint: Checkpoint, identity: Identity) -> None:
    """Raise UserError for a checkpoint of another run, unless FLYTE_DDP_GO_ON lets a function's other code go on."""
    theirs, ours = asdict(checkpoint.identity), asdict(identity)
    before, now = theirs.pop("hyperparameters"), ours.pop("hyperparameters")
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    reasons = [f"{name}={before.get(name)!r}, now {now.get(name)!r}" for name in changed]
    words = {"code": "code of flyte_ddp", "user_code": "code of your own", "initial_weights": "initial weights"}
    differing = [name for name in theirs if theirs[name] != ours[name]]
    reasons += [f"other {words.get(name, name)} ({theirs[name]}, now {ours[name]})" for name in differing]
    fix = ""
    if not changed and differing == ["user_code"] and not identity.code:  # a function's run, not a training
        folder = checkpoint.path.parents[1]
        if is_named_to_go_on(folder):
            print_to_stderr(f"{checkpoint.path} was saved by other code of your own; {GO_ON} says to go on from it")
            return
        fix = f"{describe_going_on(folder)}; else "
    if reasons:
        raise UserError(
            f"{checkpoint.path} belongs to another run: {'; '.join(reasons)}; "
            f"{fix}restore what has changed, or delete {checkpoint.path.parent}/*.ckpt to restart from scratch"
        )


def is_named_to_go_on(run_folder: Path) -> bool:
    return Path(read_text(GO_ON)).name == run_folder.name


def describe_going_on(run_folder: Path) -> str:
    return f"if only lines after the last save have changed, {GO_ON}={run_folder.name} goes on from there"
