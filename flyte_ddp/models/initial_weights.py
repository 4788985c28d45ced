"""Weights to start from: a file on this machine, or one fetched from a URI for all ranks at once."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flyte_ddp import storage
from flyte_ddp.config import Hyperparameters
from flyte_ddp.datasets.identity import content_identity
from flyte_ddp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

WRAPPINGS = ("state_dict", "model_state_dict", "model")  # under which checkpoints have the weights, Lightning's first
UNSAFE = re.compile(r"Unsupported (?:global|class|operand)[^\n]*?(?:GLOBAL )?([\w.]+) was not an allowed")
NAMED = 3  # tensors that an error names of each kind
WHAT_IT_IS = "give a file that torch.save has written, with the weights as tensors by their names"


class Weights(NamedTuple):
    """The content of a state_dict: its tensors, and the versions of modules."""

    tensors: dict[str, Tensor]
    versions: dict[str, Any]  # torch's `_metadata`, by names of modules; these convert tensors of older versions

    def without_parts(self, parts: Collection[str]) -> Weights:
        """Return the weights without the tensors and versions that ``parts`` names, itself or its module."""
        tensors, versions = (
            {name: value for name, value in each.items() if not in_parts(name, parts)} for each in self
        )
        return Weights(tensors, versions)


def identity(init_from: str) -> str:
    """Return a SHA-256 (hex) that changes with the file; empty without a file; UserError if it cannot be read."""
    if init_from:
        local_file(init_from)
    return content_identity(init_from, "init_from")


@contextmanager
def fetched(init_from: str, folder: Path) -> Iterator[Path | None]:
    """Yield a local path with the contents of ``init_from``; None if that is empty.

    A file that is not on this machine is downloaded into ``folder``, and deleted at the end.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    path = local_file(init_from) if init_from else None
    if path is not None or not init_from:
        yield path
        return
    path = folder / ".initial_weights.tmp"
    try:
        with storage.open_file(init_from) as found, path.open("wb") as target:
            target.writelines(found.chunks)
        yield path
    except storage.UnavailableError as error:
        raise error.explained(f"init_from={init_from!r}: cannot be fetched: {error}; check the address") from None
    finally:
        path.unlink(missing_ok=True)


def local_file(init_from: str) -> Path | None:
    """Return the path of a file on this machine; None if the address is elsewhere; UserError if the file is missing."""
    path = storage.local_path(init_from)
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise UserError(f"init_from={init_from!r}: {what}; {WHAT_IT_IS}")
    return path


def load_initial_weights(model: nn.Module, path: Path, hp: Hyperparameters) -> None:
    """Load a file's weights into a fresh model, but for the parts in ``init_skip``.

    Raises:
        UserError: the weights do not fit, or are not finite.
    """
    own = model.state_dict()
    stored = weights_in(path, hp.init_from)
    parts = parts_of(hp.init_skip)
    given = without_prefix(stored.without_parts(parts), own).without_parts(parts)
    for part in parts:
        if not any(in_parts(name, [part]) for name in (*own, *stored.tensors)):
            known = dict.fromkeys(name.partition(".")[0] for name in own)
            raise UserError(
                f"init_skip={hp.init_skip!r}: the model has no part {part!r}; its parts are {some(known, 12)}"
            )
    refuse_non_finite(given.tensors, own, hp.init_from)
    new = Weights(own, getattr(own, "_metadata", {}))
    wanted = new.without_parts(parts)
    tensors, versions = (
        {name: value for name, value in all_of_them.items() if name not in others} | of_file
        for all_of_them, others, of_file in zip(new, wanted, given, strict=True)
    )
    weights = OrderedDict(tensors)
    weights._metadata = versions  # type: ignore[attr-defined]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise misfit_error(wanted.tensors, given.tensors, hp, str(error)) from error


def refuse_non_finite(given: Mapping[str, Tensor], own: Mapping[str, Tensor], init_from: str) -> None:
    """Raise UserError for tensors with NaN or infinity, but where a new model has that, as masks of attention do."""
    found = [name for name, value in given.items() if name in own and not is_finite(value) and is_finite(own[name])]
    if found:
        raise UserError(
            f"init_from={init_from!r}: holds NaN or infinity in {some(found, NAMED)}; give a file with finite weights"
        )


def is_finite(values: Tensor) -> bool:
    """Return whether the tensor holds neither NaN nor infinity; True for sparse tensors, which are not looked into."""
    return values.is_sparse or values.is_sparse_csr or bool(values.isfinite().all())


def weights_in(path: Path, init_from: str) -> Weights:
    """Return the tensors in a file, with versions if it has any; reads the file whole.

    Raises:
        UserError: the file has no tensors with names, or reading it could run code.
    """
    import torch  # not at the top: the launcher, which only downloads the file, runs without torch

    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not what it should be
        if unsafe := UNSAFE.search(str(error)):
            raise UserError(
                f"init_from={init_from!r}: holds objects of {unsafe[1]} beside tensors, and to read these could run "
                "any code; save its state_dict alone, by torch.save"
            ) from None
        raise UserError(f"init_from={init_from!r}: is not a file of weights, or a damaged one; {WHAT_IT_IS}") from None
    state_dict = state_dict_in(content)
    tensors = {str(name): value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(f"init_from={init_from!r}: has no tensors with names; {WHAT_IT_IS}")
    return Weights(tensors, getattr(state_dict, "_metadata", {}))


def state_dict_in(content: Any) -> Mapping[Any, Any]:
    """Return the content, or what a checkpoint holds under one of the usual names; empty if it is no mapping."""
    if not isinstance(content, Mapping):
        return {}
    for key in WRAPPINGS:
        if isinstance(content.get(key), Mapping):
            return state_dict_in(content[key])
    return content


def without_prefix(given: Weights, own: Collection[str]) -> Weights:
    """Return the weights without what DDP (``module.``), torch.compile or Lightning put before all their names."""
    tensors, versions = given
    while tensors and not any(name in own for name in tensors):
        first = next(iter(tensors)).partition(".")[0]
        if not all(name.startswith(f"{first}.") for name in tensors):
            return given
        tensors = {name.removeprefix(f"{first}."): value for name, value in tensors.items()}
        inner = {name: value for name, value in versions.items() if in_parts(name, [first])}
        versions = {name.removeprefix(first).removeprefix("."): value for name, value in inner.items()}
    return Weights(tensors, versions)


def parts_of(init_skip: str) -> list[str]:
    """Return the names of modules and tensors that ``init_skip`` lists."""
    return [part.strip().rstrip(".") for part in init_skip.split(",") if part.strip()]


def in_parts(name: str, parts: Iterable[str]) -> bool:
    """Return whether a tensor is in one of these modules, or is one of these tensors."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def skipped_tensors(names: Iterable[str], init_skip: str) -> list[str]:
    """Return the names of tensors that start from the seed, although others start from a file."""
    parts = parts_of(init_skip)
    return [name for name in names if in_parts(name, parts)]


def misfit_error(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], hp: Hyperparameters, reason: str
) -> UserError:
    """Return the error for tensors with other names or shapes than the model's, or for another ``reason``."""
    # Old files lack BatchNorm's count, which is no reason to refuse them.
    missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    unknown = [name for name in given if name not in wanted]
    resized = [name for name in wanted if name in given and given[name].shape != wanted[name].shape]
    shapes = [f"{name} is {[*given[name].shape]} there and {[*wanted[name].shape]} in the model" for name in resized]
    reasons = [some(shapes, NAMED)] if resized else []
    reasons += [f"it has no {some(missing, NAMED)}"] if missing else []
    reasons += [f"the model has no {some(unknown, NAMED)}"] if unknown else []
    reasons = reasons or [" ".join(reason.split())]
    differing = [*missing, *unknown, *resized]
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in differing))
    few = 0 < len(modules) <= NAMED and len(differing) < len(wanted)
    parts = ",".join([*parts_of(hp.init_skip), *modules])
    fix = f"to begin with these from the seed, set init_skip={parts!r}" if few else "give weights of this model"
    return UserError(f"init_from={hp.init_from!r}: does not fit the model {hp.model!r}: {', '.join(reasons)}; {fix}")


def some(names: Collection[str], most: int) -> str:
    """Return the first of many names, with the number of the others."""
    return ", ".join([*names][:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
