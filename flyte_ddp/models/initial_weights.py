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
        tensors, versions = (
            {name: value for name, value in each.items() if not is_in_parts(name, parts)} for each in self
        )
        return Weights(tensors, versions)


def identify_weights(init_from: str) -> str:
    """Return a SHA-256 (hex) that changes with the weights' file; empty if ``init_from`` is empty.

    Reads a local file whole. Of a remote file only the server's metadata count, such as its ETag. Raises UserError if
    the file cannot be read.
    """
    if init_from:
        local_weights_path(init_from)
    return content_identity(init_from, "init_from")


@contextmanager
def fetch_weights(init_from: str, folder: Path) -> Iterator[Path | None]:
    """Yield a local path with the content of ``init_from``; None if ``init_from`` is empty.

    Downloads a remote file into ``folder`` and deletes it at the end. Raises UserError if the file is missing or cannot
    be read.
    """
    path = local_weights_path(init_from) if init_from else None
    if path is not None or not init_from:
        yield path
        return
    path = folder / ".initial_weights.tmp"
    try:
        with storage.open_file(init_from) as found, path.open("wb") as target:
            target.writelines(found.chunks)
        yield path
    except storage.UnavailableError as error:
        raise error.to_user_error(f"init_from={init_from!r}: cannot be fetched: {error}; check the address") from None
    finally:
        path.unlink(missing_ok=True)


def local_weights_path(init_from: str) -> Path | None:
    """Return the path of a file on this machine; None for a remote address. Raises UserError if the file is missing."""
    path = storage.local_path(init_from)
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise UserError(f"init_from={init_from!r}: {what}; {FILE_ADVICE}")
    return path


def load_initial_weights(model: nn.Module, path: Path, hp: Hyperparameters) -> None:
    """Load a file's weights into a new model, without the parts that ``init_skip`` names. Reads the file whole.

    Raises UserError if the weights do not fit, or are not finite.
    """
    own = model.state_dict()
    stored = read_weights(path, hp.init_from)
    parts = split_init_skip(hp.init_skip)
    given = strip_prefix(stored.drop_parts(parts), own).drop_parts(parts)
    for part in parts:
        if not any(is_in_parts(name, [part]) for name in (*own, *stored.tensors)):
            known = dict.fromkeys(name.partition(".")[0] for name in own)
            names = list_first_names(known, 12)
            raise UserError(f"init_skip={hp.init_skip!r}: the model has no part {part!r}; its parts are {names}")
    refuse_non_finite(given.tensors, own, hp.init_from)
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


def refuse_non_finite(given: Mapping[str, Tensor], own: Mapping[str, Tensor], init_from: str) -> None:
    """Raise UserError for given tensors with NaN or infinity, unless the new model's tensor has some, too.

    An attention mask, for example, has infinities in a new model.
    """
    found = [name for name, value in given.items() if name in own and not is_finite(value) and is_finite(own[name])]
    if found:
        names = list_first_names(found, MOST_NAMED)
        raise UserError(f"init_from={init_from!r}: holds NaN or infinity in {names}; give a file with finite weights")


def is_finite(values: Tensor) -> bool:
    """Return whether the tensor has neither NaN nor infinity; True for sparse tensors, which are not checked."""
    return values.is_sparse or values.is_sparse_csr or bool(values.isfinite().all())


def read_weights(path: Path, init_from: str) -> Weights:
    """Return a file's tensors, with the versions of modules if it has any. Reads the file whole.

    Raises UserError if the file has no tensors with names, or reading it could run code.
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
    state_dict = find_state_dict(content)
    tensors = {str(name): value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise UserError(f"init_from={init_from!r}: has no tensors with names; {FILE_ADVICE}")
    return Weights(tensors, getattr(state_dict, "_metadata", {}))


def find_state_dict(content: Any) -> Mapping[Any, Any]:
    """Return the mapping that a checkpoint holds under a usual name, or the content itself; {} if it is no mapping."""
    if not isinstance(content, Mapping):
        return {}
    for key in STATE_DICT_KEYS:
        if isinstance(content.get(key), Mapping):
            return find_state_dict(content[key])
    return content


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
    reasons = [list_first_names(shapes, MOST_NAMED)] if resized else []
    reasons += [f"it has no {list_first_names(missing, MOST_NAMED)}"] if missing else []
    reasons += [f"the model has no {list_first_names(unknown, MOST_NAMED)}"] if unknown else []
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
