"""Checkpoints on disk in two files, written in turn, so one good file is left if the other is damaged.

A file is an archive of torch.save, a dict of two entries. ``head`` has a line of JSON and the metrics so far as uint8.
``state`` has the saved state. The archive's comment holds the SHA-256 of the file without the comment.
"""

import errno
import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from flyte_ddp.core.checks.parsing import JsonObject, parse_json
from flyte_ddp.core.checks.records import Count, JsonRecord
from flyte_ddp.core.errors import UserError, print_to_stderr
from flyte_ddp.core.files import HashingFile, get_file_version, replace_file
from flyte_ddp.core.settings import read_text_variable

FOLDER = "checkpoints"  # in the output folder
SLOTS = ("a.ckpt", "b.ckpt")
FORMAT = "flyte-ddp-checkpoint/2"
NAME = rb"(flyte-ddp-checkpoint/\d+)"  # the name of any format
HEAD, STATE = "head", "state"  # keys of the saved dict
HEAD_NAME = "archive/data/0"  # the head's file in torch's archive
COMMENT_BYTES = len(f"{FORMAT} {'0' * 64}")
LENGTH_BYTES = 2  # of the length field before a zip archive's comment
CHUNK_BYTES = 1 << 20
QUICK_BYTES = 1 << 30  # the SHA-256 of such a file takes a second or two
GO_ON = "FLYTE_DDP_GO_ON"
LATEST = 253_402_214_400  # in seconds since 1970: the last day of the year 9999
FIELD_NAMES = {"num_ranks": "ranks", "threads": "threads of each rank", "channels_last": "channels last"}  # for texts
State = dict[str, Any]  # of a run: tensors, numbers, texts, and lists and dicts of them
Result = TypeVar("Result")


class UnreadableError(Exception):
    """A checkpoint file exists and cannot be read. The text is the reason."""


@dataclass(frozen=True)
class Identity(JsonRecord):
    """The identity of a run. Only a run with an equal identity can resume from a checkpoint.

    Ranks, devices and precision are not part of the identity, because a change affects only the rounding
    (:class:`Arithmetic`).
    """

    hyperparameters: JsonObject  # without num_ranks
    data: str = ""  # digest of the prepared data's content
    code: str = ""  # digest of this library's code
    user_code: str = ""  # digest of the user's code, without the data set's code
    initial_weights: str = ""  # digest of the file
    releases: str = ""  # of torch and the other libraries in user_code.digest.ARITHMETIC


@dataclass(frozen=True)
class Arithmetic(JsonRecord):
    """The settings that determine rounding. Equal runs with equal settings get the same bits."""

    num_ranks: int
    devices: str  # of all ranks, by rank; one name if all are equal
    precision: str
    threads: int
    channels_last: str  # "on" or "off"
    strategy: str  # of gradients; empty for one rank

    def describe_changes(self, before: Iterable[Self]) -> str:
        """Return a text of the values that differ from ``before``, such as "ranks 2, now 4", or "" if none differs."""
        words = []
        for name, now in vars(self).items():
            earlier = [*dict.fromkeys(getattr(one, name) for one in before)]
            if "" not in (now, *earlier) and earlier != [now]:
                words.append(f"{FIELD_NAMES.get(name, name)} {' and '.join(map(str, earlier))}, now {now}")
        return "; ".join(words)


# Versions of files whose SHA-256 this process has verified.
verified: set[tuple[int, int, int]] = set()


@dataclass(frozen=True)
class Header(JsonRecord):
    """Position and identity of a checkpoint."""

    epoch: Count  # finished epochs, with evaluation
    step: Count  # finished optimiser steps
    trained_in: tuple[Arithmetic, ...]  # one entry for each change of ranks, devices or precision
    time: float  # when the file was written, in seconds since 1970
    identity: Identity


@dataclass(frozen=True)
class Checkpoint(Header):
    """Path, header and metrics of a checkpoint. The state stays in the file."""

    path: Path
    metrics: bytes  # of metrics.jsonl up to this step

    def describe_resumption(self) -> str:
        when = datetime.fromtimestamp(min(max(self.time, 0), LATEST)).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 (local time)
        return f"going on after step {self.step:,}, saved {when}"


@dataclass(frozen=True)
class Handover:
    """The facts that another rank needs to write a checkpoint in rank 0's place."""

    name: str  # of the file, one of SLOTS
    step: int  # of the newest checkpoint
    epoch: int
    metrics: bytes  # what rank 0 has recorded


def choose_next_slot(folder: Path, newest: Path | None) -> Path:
    """Return the path for the next checkpoint, the file that is not ``newest``."""
    return folder / (SLOTS[1] if newest is not None and newest.name == SLOTS[0] else SLOTS[0])


def write_checkpoint(checkpoint: Checkpoint, state: Mapping[str, Any]) -> Checkpoint:
    """Write a checkpoint to its path, atomically and flushed to disk.

    Returns the checkpoint without the metrics.

    Raises:
        UserError: The file cannot be written.
    """
    import torch

    header = Header(**{field.name: getattr(checkpoint, field.name) for field in fields(Header)})
    head = bytearray(json.dumps(asdict(header)).encode() + b"\n" + checkpoint.metrics)
    with replace_file(checkpoint.path) as file:
        hashing = HashingFile(file)
        # The head comes first, where read_head() finds it.
        torch.save({HEAD: torch.frombuffer(head, dtype=torch.uint8), STATE: state}, hashing)  # type: ignore[arg-type]
        comment = f"{FORMAT} {hashing.sha256.hexdigest()}".encode()
        file.seek(-LENGTH_BYTES, os.SEEK_END)
        file.write(len(comment).to_bytes(LENGTH_BYTES, "little") + comment)
    return replace(checkpoint, metrics=b"")


def write_and_make_room(output_folder: Path, write: Callable[[], Result]) -> Result:
    """Call ``write()``, and return the result. On a full disk, first deletes the run's older checkpoint.

    Deletes the checkpoint only after ``write()`` has failed, and then calls ``write()`` again. The newest checkpoint
    stays. A failing ``write`` must raise a UserError whose cause is an OSError.
    """
    try:
        return write()
    except UserError as error:
        cause, folder = error.__cause__, output_folder / FOLDER
        if not isinstance(cause, OSError) or cause.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        newest = find_newest_checkpoint(folder, most_bytes=QUICK_BYTES)[0]
        older = [folder / name for name in SLOTS if newest is not None and (folder / name) != newest.path]
        if not any(path.exists() for path in older):
            raise
        for path in older:
            path.unlink(missing_ok=True)
    return write()


def read_checkpoint(path: Path, *, most_bytes: float = math.inf) -> Checkpoint | None:
    """Return header and metrics of a checkpoint file, or None if the file does not exist. Does not load the state.

    Verifies the SHA-256 of each version of a file once in a process. If ``most_bytes`` is given, skips the SHA-256 of
    larger files, and returns empty metrics.

    Raises:
        UnreadableError: The file exists and cannot be read.
    """
    try:
        with path.open("rb") as file:
            version = get_file_version(path)
            if version not in verified and os.fstat(file.fileno()).st_size <= most_bytes:
                check_file_digest(file)
                verified.update({version} if version else ())
            value, metrics = read_head(file, with_metrics=most_bytes == math.inf)
            header = Header.from_json_value(value, "header")
        if json.loads(json.dumps(asdict(header))) == value:  # another release may have further entries
            return Checkpoint(**vars(header), path=path, metrics=metrics)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (ValueError, KeyError):
        pass
    raise UnreadableError("its header is from another release")


def check_file_digest(file: BinaryIO) -> None:
    """Read a checkpoint file, and raise UnreadableError if the format or the SHA-256 is wrong."""
    start = file.read(len(FORMAT))
    left = max(0, file.seek(0, os.SEEK_END) - COMMENT_BYTES - LENGTH_BYTES)
    file.seek(0)
    sha256 = hashlib.sha256()
    while chunk := file.read(min(left, CHUNK_BYTES)):
        sha256.update(chunk)
        left -= len(chunk)
    sha256.update(bytes(LENGTH_BYTES))  # the length field of an archive without a comment
    end = file.read()
    # The first format was not an archive. Its files began with the format's name.
    named = re.match(NAME, start) or re.search(NAME + rb" [0-9a-f]{64}\Z", end)
    if named and named[1] != FORMAT.encode():
        raise UnreadableError(f"its format is {named[1].decode()}, and this release reads {FORMAT}")
    if end != COMMENT_BYTES.to_bytes(LENGTH_BYTES, "little") + f"{FORMAT} {sha256.hexdigest()}".encode():
        raise UnreadableError("damaged: its content does not match its SHA-256")


def read_head(file: BinaryIO, *, with_metrics: bool) -> tuple[Any, bytes]:
    """Return a checkpoint's header (a JSON value) and metrics, without importing torch.

    If ``with_metrics`` is False, the metrics are empty.

    Raises:
        UnreadableError: The archive has been cut off.
        ValueError: The head is compressed or not JSON.
        KeyError: The archive has no head.
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


def load_state(checkpoint: Checkpoint) -> State:
    """Load a checkpoint's state onto the CPU.

    Tensors are memory-mapped, so the ranks of a host share memory. While any tensor is kept, a deleted file still
    occupies the disk.
    """
    import torch

    state: State = torch.load(checkpoint.path, map_location="cpu", mmap=True, weights_only=True)[STATE]
    return state


def find_newest_checkpoint(folder: Path, *, most_bytes: float = math.inf) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest readable checkpoint (or None), and what is wrong with unreadable files, by path.

    Verifies the SHA-256 of the newest file, and of an older file only if the newest file is damaged. If ``most_bytes``
    is given, skips the SHA-256 of larger files, and the returned checkpoint has empty metrics.
    """
    unreadable: dict[Path, str] = {}

    def read(path: Path, most_bytes: float) -> Checkpoint | None:
        """Return the checkpoint in a file, or None. Store the fault of an unreadable file in ``unreadable``."""
        try:
            return read_checkpoint(path, most_bytes=most_bytes)
        except UnreadableError as reason:
            unreadable[path] = str(reason)
            return None

    # A file whose header cannot be read may be the newest.
    heads = [found for name in SLOTS if (found := read(folder / name, 0))]
    for path in [*unreadable]:
        read(path, most_bytes)  # the SHA-256 may give a better reason
    # Several saves may have the same step.
    order = lambda checkpoint: (checkpoint.step, checkpoint.epoch, checkpoint.time)  # noqa: E731
    newest_first = sorted(heads, key=order, reverse=True)
    return next(filter(None, (read(found.path, most_bytes) for found in newest_first)), None), unreadable


def mark_checkpoint_as_verified(output_folder: Path, step: int) -> None:
    """Skip the SHA-256 of a run's newest checkpoint from now on, if the checkpoint is of ``step``.

    Call this function after a rank has reported that the checkpoint was written.
    """
    newest = find_newest_checkpoint(output_folder / FOLDER, most_bytes=0)[0]
    if newest is not None and newest.step == step and (version := get_file_version(newest.path)):
        verified.add(version)


def find_newest_step(output_folder: Path) -> int | None:
    """Return the step of a run's newest readable checkpoint. Verifies the SHA-256 only of files up to 1 GiB.

    Returns 0 if no checkpoint exists, and None if no existing checkpoint is readable.
    """
    # A stopping run has little time, so the SHA-256 of a large file is skipped.
    found, unreadable = find_newest_checkpoint(output_folder / FOLDER, most_bytes=QUICK_BYTES)
    if found is not None:
        return found.step
    return None if unreadable else 0


def check_same_run(checkpoint: Checkpoint, identity: Identity) -> None:
    """Raise UserError if a checkpoint belongs to another run.

    If only the code of a user-defined function has changed, and FLYTE_DDP_GO_ON names the run, prints a notice instead.
    """
    theirs, ours = asdict(checkpoint.identity), asdict(identity)
    before, now = theirs.pop("hyperparameters"), ours.pop("hyperparameters")
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    reasons = [f"{name}={before.get(name)!r}, now {now.get(name)!r}" for name in changed]
    words = {"code": "code of flyte_ddp", "user_code": "user code", "initial_weights": "initial weights"}
    differing = [name for name in theirs if theirs[name] != ours[name]]
    reasons += [f"different {words.get(name, name)} ({theirs[name]}, now {ours[name]})" for name in differing]
    fix = ""
    if not changed and differing == ["user_code"] and not identity.code:  # the run of a function, not a training
        folder = checkpoint.path.parents[1]
        if is_named_to_go_on(folder):
            print_to_stderr(f"{checkpoint.path} was saved by different user code; resuming, as {GO_ON} names this run")
            return
        fix = f"{describe_going_on(folder)}; else "
    if reasons:
        raise UserError(
            f"{checkpoint.path} belongs to another run: {'; '.join(reasons)}; "
            f"{fix}restore what has changed, or delete {checkpoint.path.parent}/*.ckpt to restart from scratch"
        )


def is_named_to_go_on(run_folder: Path) -> bool:
    return Path(read_text_variable(GO_ON)).name == run_folder.name


def describe_going_on(run_folder: Path) -> str:
    return f"if only lines after the last save have changed, set {GO_ON}={run_folder.name} to resume"
