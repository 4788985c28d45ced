"""Initial weights: from a file on this machine, or from a URI that is downloaded once for all ranks."""

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

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")  # of checkpoints; the first one is Lightning's
UNSAFE = re.compile(r"Unsupported (?:global|class|operand)[^\n]*?(?:GLOBAL )?([\w.]+) was not an allowed")
MOST_NAMED = 3  # largest number of tensors of a kind that an error names
FILE_ADVICE = "give a file that torch.save has written, with the weights as tensors by their names"


class Weights(NamedTuple):
    """The content of a state_dict: tensors, and versions of modules."""

    tensors: dict[str, Tensor]
    versions: dict[str, Any]  # torch's ``_metadata`` by module name: modules convert tensors of older versions by it

    def drop_parts(self, parts: Collection[str]) -> Weights:
        """Return the weights without the tensors and versions in ``parts`` (names of tensors or modules)."""
        return Weights(*({name: each[name] for name in each if not is_in_parts(name, parts)} for each in self))


def identify_weights(init_from: str) -> str:
    """Return a SHA-256 (hex) that changes with the weights' file; empty if ``init_from`` is empty.

    Reads a local file whole. Asks the server of a remote file for its ETag, or else its time of change, with up to 3
    retries; downloads a file of a web server that tells neither. Raises UserError if the file cannot be read.
    """
    local_weights_path(init_from)
    return content_identity(init_from, "init_from")


@contextmanager
def fetch_weights(init_from: str, folder: Path) -> Iterator[Path | None]:
    """Yield a local path with the content of ``init_from``; None if ``init_from`` is empty.

    Downloads a remote file into ``folder``, without a retry, and deletes it after the block. Raises UserError if the
    file is missing or cannot be read.
    """
    path = local_weights_path(init_from)
    if path is not None or not init_from:
        yield path
        return
    path = folder / ".initial_weights.tmp"
    try:
        with storage.open_file(init_from) as opened, path.open("wb") as target:
            target.writelines(opened.chunks)
        yield path
    except storage.UnavailableError as error:
        raise error.to_user_error(f"init_from={init_from!r}: cannot be fetched: {error}; check the address") from None
    finally:
        path.unlink(missing_ok=True)


def local_weights_path(init_from: str) -> Path | None:
    """Return the path of a file on this machine; None for a remote or empty address. UserError if it is missing."""
    path = storage.local_path(init_from) if init_from else None
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise UserError(f"init_from={init_from!r}: {what}; {FILE_ADVICE}")
    return path


def load_initial_weights(model: nn.Module, path: Path, hp: Hyperparameters) -> None:
    """Load the weights in a file into a new model, but for the parts that ``init_skip`` names. Reads the file whole.

    A prefix that all names in the file have is removed, such as DDP's ``module.``. Raises UserError if the weights do
    not fit, are not finite, or reading them could run code.
    """
    own = model.state_dict()
    parts = split_init_skip(hp.init_skip)
    stored = read_weights(path, hp.init_from)
    given = strip_prefix(stored.drop_parts(parts), own).drop_parts(parts)
    for part in parts:
        if not any(is_in_parts(name, [part]) for name in (*own, *stored.tensors)):
            names = list_first_names(dict.fromkeys(name.partition(".")[0] for name in own), 12)
            raise UserError(f"init_skip={hp.init_skip!r}: the model has no part {part!r}; its parts are {names}")
    # Where the new model itself has infinities, as in a mask of attention, the file may have some.
    compared = ((name, value, own[name]) for name, value in given.tensors.items() if name in own)
    bad = [name for name, value, fresh in compared if not is_finite(value) and is_finite(fresh)]
    if bad:
        names = list_first_names(bad, MOST_NAMED)
        raise UserError(
            f"init_from={hp.init_from!r}: holds NaN or infinity in {names}; give a file with finite weights"
        )
    new = Weights(own, getattr(own, "_metadata", {}))
    wanted = new.drop_parts(parts)
    # The skipped parts keep what the new model has. All goes through load_state_dict, which refuses missing tensors.
    weights = OrderedDict({name: own[name] for name in own if name not in wanted.tensors} | given.tensors)
    skipped_versions = {name: new.versions[name] for name in new.versions if name not in wanted.versions}
    weights._metadata = skipped_versions | given.versions  # type: ignore[attr-defined]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise misfit_error(wanted.tensors, given.tensors, hp, str(error)) from error


def is_finite(values: Tensor) -> bool:
    """Return whether the tensor has neither NaN nor infinity; True for sparse tensors, which are not checked."""
    return values.is_sparse or values.is_sparse_csr or bool(values.isfinite().all())


def read_weights(path: Path, init_from: str) -> Weights:
    """Return a file's tensors, with the versions of modules if it has any. Reads the file whole.

    The file has a state_dict, or a checkpoint that holds one under one of STATE_DICT_KEYS. Raises UserError if it has
    no tensors with names, or reading it could run code.
    """
    import torch  # not at the top, because the launcher only downloads the file and need not import torch

    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of exceptions for a file of another format
        if unsafe := UNSAFE.search(str(error)):
            raise UserError(
                f"init_from={init_from!r}: holds objects of {unsafe[1]} beside tensors, and reading them could run "
                "any code; save only its state_dict, by torch.save"
            ) from None
        raise UserError(f"init_from={init_from!r}: is not a file of weights, or a damaged one; {FILE_ADVICE}") from None
    found = content if isinstance(content, Mapping) else {}
    while keys := [key for key in STATE_DICT_KEYS if isinstance(found.get(key), Mapping)]:
        found = found[keys[0]]
    tensors = {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(f"init_from={init_from!r}: has no tensors with names; {FILE_ADVICE}")
    return Weights(tensors, getattr(found, "_metadata", {}))


def strip_prefix(given: Weights, own: Collection[str]) -> Weights:
    """Return the weights without a prefix that all their names have, such as DDP's ``module.``.

    Removes prefixes until a name is one of ``own``. torch.compile and Lightning add prefixes, too. Returns the weights
    unchanged where names have no common prefix.
    """
    tensors, versions = given
    while tensors and not any(name in own for name in tensors):
        first = next(iter(tensors)).partition(".")[0]
        if not all(name.startswith(f"{first}.") for name in tensors):
            return given
        tensors = {name.removeprefix(f"{first}."): value for name, value in tensors.items()}
        inner = {name: value for name, value in versions.items() if is_in_parts(name, [first])}
        versions = {name.removeprefix(first).removeprefix("."): value for name, value in inner.items()}
    return Weights(tensors, versions)


def split_init_skip(init_skip: str) -> list[str]:
    """Return the names of modules and tensors that ``init_skip`` lists."""
    return [part.strip().rstrip(".") for part in init_skip.split(",") if part.strip()]


def is_in_parts(name: str, parts: Iterable[str]) -> bool:
    """Return whether ``name`` is one of the tensors or modules in ``parts``, or is inside one of these modules."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def skipped_tensor_names(names: Iterable[str], init_skip: str) -> list[str]:
    """Return those of the tensors' names that ``init_skip`` excludes: these tensors start from the seed."""
    parts = split_init_skip(init_skip)
    return [name for name in names if is_in_parts(name, parts)]


def misfit_error(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], hp: Hyperparameters, reason: str
) -> UserError:
    """Return the error for tensors whose names or shapes differ from the model's, or else for torch's ``reason``."""
    # Old files lack BatchNorm's count, which load_state_dict allows.
    missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    unknown = [name for name in given if name not in wanted]
    resized = [name for name in wanted if name in given and given[name].shape != wanted[name].shape]
    shapes = [f"{name} is {[*given[name].shape]} there and {[*wanted[name].shape]} in the model" for name in resized]
    groups = {"{}": shapes, "it has no {}": missing, "the model has no {}": unknown}
    reasons = [words.format(list_first_names(names, MOST_NAMED)) for words, names in groups.items() if names]
    reasons = reasons or [" ".join(reason.split())]
    differing = [*missing, *unknown, *resized]
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in differing))
    few = 0 < len(modules) <= MOST_NAMED and len(differing) < len(wanted)
    parts = ",".join([*split_init_skip(hp.init_skip), *modules])
    fix = f"to begin with these from the seed, set init_skip={parts!r}" if few else "give weights of this model"
    return UserError(f"init_from={hp.init_from!r}: does not fit the model {hp.model!r}: {', '.join(reasons)}; {fix}")


def list_first_names(names: Collection[str], most: int) -> str:
    """Return the first ``most`` names as text, with the number of the other names."""
    return ", ".join([*names][:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
