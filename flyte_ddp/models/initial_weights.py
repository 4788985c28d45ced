"""Load initial weights from a file, a URI or torchvision, downloaded once for all ranks, and freeze parts of models."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp import catalog, storage
from flyte_ddp.catalog import PretrainedWeights
from flyte_ddp.core.errors import UserError
from flyte_ddp.core.files import file_digest, replace_file
from flyte_ddp.core.models.parts import is_in_parts, make_unknown_part_error, split_part_names
from flyte_ddp.core.progress import Progress
from flyte_ddp.storage.identity import digest_lines, hash_address_content

if TYPE_CHECKING:
    from torch import Tensor, nn

STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")  # keys in checkpoints, the first of Lightning
LONGEST_REASON = 500  # maximum number of characters of torch's text
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # heads of GoogLeNet and Inception v3, which this library's models lack
OLD_DENSE_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
FILE_ADVICE = "give a file written by torch.save that maps names to tensors"


def hash_initial_weights(init_from: str, weights: PretrainedWeights | None) -> str:
    """Return a SHA-256 (hex) that changes with the file of initial weights, or "" if ``init_from`` is empty.

    Of torchvision's ``weights``, the address is hashed. Of another remote file, the ETag or the time of change is
    hashed. A file without both is downloaded. Of a local file, the content is hashed.

    Raises:
        UserError: The file does not exist or cannot be read.
    """
    if weights:
        return digest_lines([f"{catalog.TORCHVISION_ADDRESS}/{weights.file}"])
    find_local_weights_path(init_from)
    return hash_address_content(init_from, "init_from")


@contextmanager
def fetch_initial_weights(
    init_from: str, model: str, folder: Path, progress: Progress, mirror: str
) -> Iterator[Path | None]:
    """Download the file of initial weights if needed, and yield its local path (None if ``init_from`` is empty).

    A download is tried up to 4 times, is written to ``folder``, and is deleted after the block. Weights of torchvision
    are kept in torch hub's cache.

    Args:
        init_from: A path, an address, ``torchvision:NAME`` or "".
        model: The name of the model.
        folder: An existing folder for a download.
        progress: Shows a download of torchvision's weights.
        mirror: A folder or address with torchvision's files, or "" for the public address.

    Raises:
        UserError: A download failed, a local file does not exist, or torchvision has no such weights for the model.
    """
    if weights := catalog.find_torchvision_weights(model, init_from):
        yield fetch_torchvision_weights(weights, progress, init_from=init_from, mirror=mirror)
        return
    local, temporary = find_local_weights_path(init_from), folder / ".initial_weights.tmp"
    if local is not None or not init_from:
        yield local
        return
    try:
        try:
            with replace_file(temporary, durable=False) as target:
                storage.call_with_retries(init_from, partial(storage.download_file, file=target), progress.print_note)
        except storage.UnavailableError as error:
            what = f"init_from={init_from!r}: cannot be fetched: {error}; check the address"
            raise error.to_user_error(what) from None
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def fetch_torchvision_weights(weights: PretrainedWeights, progress: Progress, *, init_from: str, mirror: str) -> Path:
    """Return the path of a file of torchvision's weights in torch hub's cache. Downloads the file if needed.

    The file is verified by the digest in its name. A missing or damaged file is downloaded, in up to 4 tries, from
    ``mirror`` (a folder or an address) or from torchvision's address.

    Raises:
        UserError: The file cannot be downloaded or written.
    """
    path = get_torch_hub_folder() / "checkpoints" / weights.file
    with suppress(OSError):
        if file_digest(path).startswith(weights.digest_start):
            return path
    address = storage.join_address(mirror or catalog.TORCHVISION_ADDRESS, weights.file)
    try:
        with replace_file(path) as file:
            download = partial(storage.download_file, file=file, digests=[weights.digest_start], progress=progress)
            storage.call_with_retries(address, download, progress.print_note)
    except storage.UnavailableError as error:
        raise error.to_user_error(
            f"init_from={init_from!r}: cannot get {address}: {error}; check the network, or set FLYTE_DDP_WEIGHTS to a "
            "folder or mirror that has the file"
        ) from None
    except UserError as error:
        raise UserError(f"{error}, by TORCH_HOME") from None
    return path


def get_torch_hub_folder() -> Path:
    """Return the folder that torch.hub.get_dir() returns in a new process. Does not import torch."""
    home = os.environ.get("TORCH_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "torch"
    return Path(home).expanduser() / "hub"


def rename_densenet_layers(state_dict: dict[str, Tensor]) -> None:
    """Rename DenseNet's layers to torchvision's current names, in place. Also removes auxiliary heads of any model."""
    for name in [*state_dict]:
        value = state_dict.pop(name)  # and put back, to keep the order of names
        if not name.startswith(AUXILIARY):
            state_dict[OLD_DENSE_NAME.sub(r"\1\2.", name)] = value


def find_local_weights_path(init_from: str) -> Path | None:
    """Return the path of a file on this machine, or None if ``init_from`` is remote or empty.

    Raises:
        UserError: The file does not exist or cannot be read.
    """
    path = storage.find_local_path(init_from) if init_from else None
    try:
        if path is not None and not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"init_from={init_from!r}: {what}; {FILE_ADVICE}")
    except OSError as error:
        raise UserError(f"init_from={init_from!r}: cannot be read: {error.strerror}; {FILE_ADVICE}") from None
    return path


def load_initial_weights(model: nn.Module, path: Path, *, name: str, init_from: str, init_skip: str) -> None:
    """Load the weights in a file into a new model, in place.

    Parts that ``init_skip`` names keep the weights of the new model. If the weights are torchvision's and the last
    layer does not have 1,000 classes, the last layer keeps its weights, too. Prefixes that all names in the file have,
    for example DDP's ``module.``, are removed.

    Args:
        model: The new model.
        path: The file.
        name: The name of the model in errors.
        init_from: The hyperparameter, the address from which the file was fetched.
        init_skip: Names of parts, separated by commas.

    Raises:
        UserError: The file is damaged or could run code, the weights do not fit, or a part is unknown.
    """
    own, weights = model.state_dict(), read_state_dict(path, init_from)
    if init_from.startswith(catalog.TORCHVISION_PREFIX):
        rename_densenet_layers(weights)
    parts, stored_names = list_randomly_initialised_parts(own, init_from, init_skip), [*weights]
    delete_parts_in_place(weights, parts)  # by names in the file, and below by names in the model
    remove_common_prefixes(weights, own)
    delete_parts_in_place(weights, parts)
    for part in parts:
        if not any(is_in_parts(each, [part]) for each in (*own, *stored_names)):
            raise make_unknown_part_error(f"init_skip={init_skip!r}", part, own)
    # Skipped parts keep the new model's tensors, which load_state_dict needs because it rejects missing tensors.
    for target, fresh in ((weights, own), (weights._metadata, getattr(own, "_metadata", {}))):
        target.update({key: fresh[key] for key in fresh if is_in_parts(key, parts)})
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise UserError(
            f"init_from={init_from!r}: does not fit the model {name!r}: {reason}; give weights of this model, or list "
            "the parts that should start with random weights in init_skip"
        ) from error


def read_state_dict(path: Path, init_from: str) -> Any:
    """Read a file of weights, and return the tensors by name, as a state_dict on the CPU.

    If the file is a checkpoint, returns the state_dict under a key of ``STATE_DICT_KEYS``. Values that are no tensors
    are dropped. ``init_from`` is named in errors.

    Raises:
        UserError: The file is damaged, could run code, or has no tensors with names.
    """
    import torch  # not at the top, because the launcher only downloads the file and does not need torch

    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of exceptions for a file of another format
        raise UserError(
            f"init_from={init_from!r}: is damaged, or contains other objects than weights, which could run code when "
            f"loaded; {FILE_ADVICE}"
        ) from error
    found = content if isinstance(content, Mapping) else {}
    while keys := [key for key in STATE_DICT_KEYS if isinstance(found.get(key), Mapping)]:
        found = found[keys[0]]
    weights: Any = OrderedDict((str(name), value) for name, value in found.items() if isinstance(value, torch.Tensor))
    if not weights:
        raise UserError(f"init_from={init_from!r}: contains no named tensors; {FILE_ADVICE}")
    weights._metadata = dict(getattr(found, "_metadata", {}))  # modules use it to convert tensors of older versions
    return weights


def delete_parts_in_place(weights: Any, parts: Collection[str]) -> None:
    """Delete the tensors and the metadata of the named parts of a model from a state_dict."""
    for named in (weights, weights._metadata):
        for name in [name for name in named if is_in_parts(name, parts)]:
            del named[name]


def remove_common_prefixes(weights: Any, model_names: Collection[str]) -> None:
    """Remove prefixes that all names in a state_dict have, for example DDP's ``module.``, in place.

    If no shortened name is in ``model_names``, removes nothing.
    """
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    names, prefixes = [*weights], []
    while names and not any(name in model_names for name in names):
        prefixes.append(f"{names[0].partition('.')[0]}.")
        if not all(name.startswith(prefixes[-1]) for name in names):
            return
        names = [name.removeprefix(prefixes[-1]) for name in names]
    for prefix in prefixes:
        consume_prefix_in_state_dict_if_present(weights, prefix)


def list_randomly_initialised_parts(model: Mapping[str, Tensor], init_from: str, init_skip: str) -> list[str]:
    """Return the names of the model's parts that keep random weights although ``init_from`` is set.

    These are the parts in ``init_skip``. For torchvision's weights, the last layer is added, unless it has 1,000
    classes. ``model`` is the state_dict of the new model.
    """
    parts = split_part_names(init_skip)
    if init_from.startswith(catalog.TORCHVISION_PREFIX):
        name, tensor = [*model.items()][-1]
        if len(tensor) != catalog.TORCHVISION_CLASSES:
            parts.append(name.rpartition(".")[0])
    return parts


def list_randomly_initialised_tensors(model: Mapping[str, Tensor], init_from: str, init_skip: str) -> list[str]:
    """Return the names of the tensors that keep random weights although ``init_from`` is set.

    These are the tensors of :func:`list_randomly_initialised_parts`. ``model`` is the state_dict of the new model.
    """
    parts = list_randomly_initialised_parts(model, init_from, init_skip)
    return [name for name in model if is_in_parts(name, parts)]
