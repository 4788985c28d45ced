"""Checkpoints on disk: two files, written in turn, so that one good file is left whatever happens to the other.

A file holds its SHA-256, a header (a line of JSON), the metrics so far, and the state that torch saved.
"""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self, get_origin, get_type_hints

from flyte_ddp import results
from flyte_ddp.checks.forms import COUNT, require_form
from flyte_ddp.checks.parsing import parse_json
from flyte_ddp.errors import UserError, print_to_stderr
from flyte_ddp.files import HashingFile, replace_file
from flyte_ddp.settings import read_text

FOLDER = "checkpoints"  # in the output folder
SLOTS = ("a.ckpt", "b.ckpt")
FORMAT = "flyte-ddp-checkpoint/1"
DIGEST_LINE = len(f"{FORMAT} {'0' * 64}\n")
GO_ON = "FLYTE_DDP_GO_ON"
LATEST = 253_402_214_400  # the last day of the year 9999, the last of datetime, in seconds since 1970
FIELD_NAMES = {"num_ranks": "ranks", "threads": "threads of each rank", "channels_last": "channels last"}  # for texts


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
    "metrics_bytes": COUNT,
}


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
    offset: int = 0  # of the state in the file, in bytes; 0 until it is written

    def describe_resumption(self) -> str:
        when = datetime.fromtimestamp(min(max(self.time, 0), LATEST)).strftime("%Y-%m-%d %H:%M:%S")  # noqa: DTZ006 (local time)
        return f"going on after step {self.step:,}, saved {when}"


def next_slot(folder: Path, newest: Path | None) -> Path:
    """Return the path of the next checkpoint: of the two files the one that is not ``newest``."""
    return folder / (SLOTS[1] if newest is not None and newest.name == SLOTS[0] else SLOTS[0])


def write_checkpoint(checkpoint: Checkpoint, save: Callable[[Any], object]) -> Checkpoint:
    """Write a checkpoint to its path, atomically and flushed to disk; UserError if that fails.

    ``save`` writes the state into a file with only ``write`` and ``flush``. Returns the checkpoint with its offset, and
    without the metrics.
    """
    values, metrics = asdict(checkpoint), checkpoint.metrics
    described = {name: values[name] for name in ("epoch", "step", "trained_in", "time", "identity")}
    header = json.dumps({**described, "metrics_bytes": len(metrics)}).encode() + b"\n"
    with replace_file(checkpoint.path) as file:
        file.write(b" " * DIGEST_LINE)  # is overwritten when the digest is known
        hashing = HashingFile(file)
        hashing.write(header)
        hashing.write(metrics)
        save(hashing)
        file.seek(0)
        file.write(f"{FORMAT} {hashing.sha256.hexdigest()}\n".encode())
    return replace(checkpoint, metrics=b"", offset=DIGEST_LINE + len(header) + len(metrics))


def read_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint | None:
    """Return a file's Checkpoint, or None without a file; check the SHA-256 if ``verify``; raise UnreadableError."""
    try:
        with path.open("rb") as file:
            digest_line = file.read(DIGEST_LINE)
            its_format = digest_line.partition(b" ")[0].decode(errors="replace")
            if its_format != FORMAT and re.fullmatch(r"flyte-ddp-checkpoint/\d+", its_format):
                raise UnreadableError(f"its format is {its_format}, and this release reads {FORMAT}")
            intact = f"{FORMAT} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode() if verify else digest_line
            if its_format != FORMAT or digest_line != intact:
                raise UnreadableError("damaged: its content does not match its SHA-256")
            file.seek(DIGEST_LINE)
            header = parse_json(file.readline())
            require_form(header, HEADER, "header")
            header["metrics"] = file.read(header.pop("metrics_bytes"))
            header["identity"] = Identity(**header["identity"])
            header["trained_in"] = tuple(Arithmetic(**entry) for entry in header["trained_in"])
            return Checkpoint(path, **header, offset=file.tell())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError("its header is another release's") from error


def verify_checkpoints(folder: Path, *, whole: bool = True) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest readable checkpoint or None, and faults of bad ones by path; verify SHA-256 if ``whole``."""
    readable: list[Checkpoint] = []
    unreadable: dict[Path, str] = {}
    for name in SLOTS:
        try:
            found = read_checkpoint(folder / name, verify=whole)
        except UnreadableError as reason:
            unreadable[folder / name] = str(reason)
        else:
            readable += [found] if found is not None else []
    # A user's function may save a step more than once.
    order = lambda checkpoint: (checkpoint.step, checkpoint.epoch, checkpoint.time)  # noqa: E731
    return max(readable, key=order, default=None), unreadable


def newest_step(output_folder: Path) -> int | None:
    """Return the step of a run's newest checkpoint: 0 if the run has none, None if it has some and none is readable."""
    found, unreadable = verify_checkpoints(output_folder / FOLDER, whole=False)  # a run that is to end has little time
    if found is not None:
        return found.step
    return None if unreadable else 0


def read_saved_state(checkpoint: Checkpoint) -> io.BytesIO:
    with checkpoint.path.open("rb") as file:
        file.seek(checkpoint.offset)
        return io.BytesIO(file.read())


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
